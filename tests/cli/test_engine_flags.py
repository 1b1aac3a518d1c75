"""Options that are made of the configuration's fields, and vLLM's names of them."""

from __future__ import annotations

import pytest

from raylm import LLM
from raylm.cli import dashed, make_parser
from raylm.cli.options import engine_config
from raylm.config.engine import EngineConfig
from raylm.config.engine_keys import engine_keys, engine_sections
from raylm.config.vllm_names import ANYWAY, NAMES, REFUSED, TAKES_VALUE, flag
from raylm.config.vllm_objects import OBJECTS
from raylm.errors import ConfigError
from raylm.serving.program.serve_file import serve_config
from tests.cli import vllm_table

_SAMPLES = {int: "3", float: "0.5", str: "x", dict: '{"a": 2}'}


def given(*words: str) -> EngineConfig:
    return engine_config(make_parser().parse_args(["doctor", "some/model", *words]))


def test_every_key_is_an_option():
    """Each with a value of its type reaches its key."""
    parser = make_parser()
    for key in engine_keys().values():
        word = flag(key.name)
        words = [word] if key.kind is bool else [word, str(key.choices[0]) if key.choices else _SAMPLES[key.kind]]
        args = parser.parse_args(["serve", "m", *words])
        value = vars(args)["engine:" + key.name]
        assert (value[0] if key.several else value) is not None, key


def test_options_and_their_opposites():
    config = given("--no-cuda-graphs", "--no-prefix-caching", "--speculation-method", "ngram")
    assert (config.runtime.cuda_graphs, config.cache.prefix_caching) == (False, False)
    assert config.speculation.method == "ngram"
    assert given("--pipeline", "2", "--stage-layers", "2", "1").parallel.stage_layers == [2, 1]


def test_vllm_names():
    config = given(
        *("--tensor-parallel-size", "4", "-pp", "2", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--gpu-memory-utilization", "0.8", "--served-model-name", "chat", "--dtype", "half", "--swap-space", "2"),
        *("--tool-call-parser", "hermes", "--scheduling-policy", "priority", "--enable-chunked-prefill"),
    )
    assert (config.parallel.tensor, config.parallel.pipeline) == (4, 2)
    assert (config.runtime.cuda_graphs, config.cache.prefix_caching) == (False, False)
    assert (config.cache.gpu_memory_utilization, config.cache.swap_gib) == (0.8, 2)
    assert (config.model.served_name, config.model.dtype) == ("chat", "float16")
    assert (config.chat.tools, config.scheduler.policy) == ("hermes", "priority")
    assert given("--enable-prefix-caching").cache.prefix_caching
    assert given("--kv-cache-dtype", "fp8").cache.dtype == given("--kv-cache-dtype", "fp8_e4m3").cache.dtype == "fp8"


def test_vllm_names_of_sampling():
    assert given("--generation-config", "vllm").generation.defaults == "neutral"
    assert given("--generation-config", "auto").generation.defaults == given().generation.defaults == "model"
    assert given("--override-generation-config", '{"temperature": 0.2, "top_k": 5}').model.sampling.top_k == 5
    with pytest.raises(ConfigError, match=r"generation\.defaults"):
        given("--generation-config", "some/folder")


@pytest.mark.parametrize(
    ("text", "method", "model", "drafts", "bounds"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}', "ngram", None, 5, (3, 3)),
        ('{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}', "ngram", None, 7, (2, 5)),
        ('{"model": "small", "draft_tensor_parallel_size": 1}', "draft_model", "small", 7, (2, 4)),
        ('{"method": "eagle3", "model": "head", "num_speculative_tokens": 3}', "eagle3", "head", 3, (2, 4)),
    ],
)
def test_vllm_s_object_of_speculation(text, method, model, drafts, bounds):
    found = given("--speculative-config", text).speculation
    assert (found.method, found.model, found.num_drafts, (found.min_n, found.max_n)) == (method, model, drafts, bounds)


def test_vllm_s_object_of_kv_events():
    said = '{"enable_kv_cache_events": true, "topic": "kv@a@b", "buffer_steps": 5, "hwm": 7, "max_queue_size": 9}'
    found = given("--kv-events-config", said).kv_events
    assert (found.endpoint, found.topic, found.buffer_steps, found.max_queued) == ("tcp://*:5557", "kv@a@b", 5, 9)
    own = {"enable_kv_cache_events": True, "endpoint": "tcp://*:7000"}
    assert engine_sections({"kv_events_config": own}, source="test") == {"kv_events": {"endpoint": "tcp://*:7000"}}
    for off in ({"endpoint": "tcp://*:7000"}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert engine_sections({"kv_events_config": off}, source="test") == {"kv_events": {"endpoint": None}}
    bare = {"enable_kv_cache_events": True, "publisher": None, "topic": None}
    assert engine_sections({"kv_events_config": bare}, source="test") == {"kv_events": {"endpoint": "tcp://*:5557"}}


def test_objects_without_a_value_say_nothing():
    for name in OBJECTS:
        assert engine_sections({name: None}, source="test") == {}
    said = {"model": "small", "method": None, "prompt_lookup_min": None}
    assert engine_sections({"speculative_config": said}, source="test") == {
        "speculation": {"model": "small", "method": "draft_model"}
    }


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("speculative_config", {"method": "ngram", "quantization": "fp8"}, "has the field 'quantization', which raylm"),
        ("speculative_config", "ngram", "speculative_config must be a JSON object, got 'ngram'"),
        ("speculative_config", {"num_speculative_tokens": 3}, "speculative_config needs a method or a model"),
        ("kv_events_config", {"publisher": "nats"}, "has the publisher 'nats'; allowed: zmq, null"),
    ],
)
def test_objects_that_say_what_raylm_has_not(name, value, sentence):
    with pytest.raises(ConfigError, match=sentence):
        engine_sections({name: value}, source="LLM(...)")


def test_types_of_the_model_and_of_its_cache_are_two_options():
    config = given("--dtype", "float16", "--cache-dtype", "fp8")
    assert (config.model.dtype, config.cache.dtype) == ("float16", "fp8")


def test_scales_of_the_cache():
    fp8 = ("--cache-dtype", "fp8")
    measured = [(*fp8, "--cache-scales", "measured"), (*fp8, "--calculate-kv-scales")]
    assert [given(*flags).cache.scales for flags in measured] == ["measured"] * 2
    assert given(*fp8, "--no-calculate-kv-scales").cache.scales == given(*fp8).cache.scales == "checkpoint"


def test_several_served_names_are_a_name_and_aliases():
    model = given("--served-model-name", "chat", "small", "owner/chat").model
    assert (model.served_name, model.aliases) == ("chat", ["small", "owner/chat"])
    assert engine_sections({"served_model_name": ["a", "b"]}, source="test") == {
        "model": {"aliases": ["b"], "name": "a"}
    }
    assert engine_sections({"served_model_name": "a"}, source="test") == {"model": {"name": "a"}}
    with pytest.raises(ConfigError, match="served_model_name is an empty list; give one value at least"):
        engine_sections({"served_model_name": []}, source="test")
    with pytest.raises(ConfigError, match="aliases holds 'chat', which the model is named already"):
        given("--served-model-name", "chat", "chat")


@pytest.mark.parametrize("name", REFUSED)
def test_what_raylm_has_not_is_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", flag(name), "1", "some/model"])
    assert f"{flag(name)} is not taken: {REFUSED[name]}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"{name} is not taken: "):
        engine_sections({name: 1}, source="LLM(...)")


def test_what_asks_for_what_is_done_anyway():
    for name in ANYWAY:
        words = ["--" + name.replace("_", "-"), *(["1"] if name in TAKES_VALUE else [])]
        assert engine_config(make_parser().parse_args(["doctor", *words, "some/model"])) == given()
        assert engine_sections({name: True}, source="LLM(...)") == {}


@pytest.mark.parametrize(
    ("text", "count"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1.001k", 1001), ("2m", 2_000_000)]
)
def test_numbers_with_units(text: str, count: int):
    assert given("--max-model-len", text).model.max_model_len == count


@pytest.mark.parametrize("text", ["k", "1.0001k", "8kb", "eight", "nank", "infinityk"])
def test_numbers_that_are_not_whole(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        given("--max-num-batched-tokens", text)
    error = capsys.readouterr().err
    assert "argument --max-num-batched-tokens: " in error and text in error


def test_short_names_and_underscores():
    assert given("-q", "fp8", "-tp", "2") == given("--quantization", "fp8", "--tensor", "2")
    draft = ("-sc", '{"method": "ngram", "num_speculative_tokens": 3}')
    assert (
        given(*draft).speculation == given("--speculation-method", "ngram", "--speculation-num-drafts", "3").speculation
    )
    assert given("--no-enable-chunked-prefill", "--no-async-scheduling") == given()
    assert dashed("--max_model_len=a_b") == "--max-model-len=a_b"
    assert [dashed(word) for word in ("a_b", "-a_b", "--max-model-len")] == ["a_b", "-a_b", "--max-model-len"]


def test_the_tables_do_not_overlap():
    assert not NAMES.keys() & ANYWAY.keys() and not NAMES.keys() & REFUSED.keys() and not ANYWAY.keys() & REFUSED.keys()
    assert not OBJECTS.keys() & {*NAMES, *ANYWAY, *REFUSED}
    assert not engine_keys().keys() & {*NAMES, *ANYWAY, *REFUSED, *OBJECTS}
    assert {renamed.key for renamed in NAMES.values()} <= engine_keys().keys()
    assert {key for option in OBJECTS.values() for key in option.fields.values()} <= engine_keys().keys()


def test_an_unknown_name():
    with pytest.raises(ConfigError, match="there is no option 'max_modl_len' \\(did you mean 'max_model_len'\\?\\)"):
        engine_sections({"max_modl_len": 3}, source="LLM(...)")
    with pytest.raises(ConfigError, match="there is no option 'tensor_paralel_size'"):
        LLM("some/model", tensor_paralel_size=2)
    with pytest.raises(ConfigError, match="dtype is given beside a whole EngineConfig"):
        LLM(EngineConfig.model_validate({"model": {"path": "x"}}), dtype="auto")


def test_a_near_name_is_told(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "some/model", "--max-modl-len=3"])
    assert "unrecognized arguments: --max-modl-len=3 (did you mean --max-model-len?)" in capsys.readouterr().err


@pytest.mark.usefixtures("demo")
def test_serve_takes_them_for_its_one_model(tmp_path):
    sections = {"scheduler": {"max_num_seqs": 5}}
    (_, entry) = serve_config("smollm2-135m", host=None, port=None, engine=sections)["applications"]
    assert entry["args"]["engine"]["scheduler"]["max_num_seqs"] == 5
    one = "\n".join(
        [
            "applications:",
            "- {name: llm, route_prefix: /, import_path: 'raylm.serving.app:build_ingress'}",
            "- {name: a, route_prefix: null, import_path: 'raylm.serving.app:build_model',",
            "   args: {engine: {model: {path: smollm2-135m, name: a}}}}",
        ]
    )
    (tmp_path / "one.yaml").write_text(one)
    (_, entry) = serve_config(str(tmp_path / "one.yaml"), host=None, port=None, engine=sections)["applications"]
    assert entry["args"]["engine"] == {"model": {"path": "smollm2-135m", "name": "a"}, **sections}
    two = one + "\n" + "\n".join(one.split("\n")[2:]).replace("name: a", "name: b")
    (tmp_path / "two.yaml").write_text(two)
    with pytest.raises(ConfigError, match=r"has 2 models; options of an engine \(scheduler.max_num_seqs\) go with one"):
        serve_config(str(tmp_path / "two.yaml"), host=None, port=None, engine=sections)


def test_the_page_is_current():
    assert vllm_table.PATH.read_text(encoding="utf-8") == vllm_table.text(), "python -m tests.cli.vllm_table"
