"""A wrong configuration says where, what and what is allowed, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from raylm.config.application import ModelDeployment, load_ingress, load_model
from raylm.config.base import load_yaml, parse
from raylm.config.engine import EngineConfig
from raylm.config.front import FrontConfig
from raylm.config.hub_name import HubName, hub_name
from raylm.config.resolve import followed, resolve
from raylm.config.sampling import SamplingDefaults
from raylm.errors import ConfigError
from raylm.model_files.advice import sampling_advice, sampling_defaults
from raylm.model_files.source import locate

MODEL = {"path": "smollm2-135m"}


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({}, ["key 'model' is required"]),
        ({"model": {}}, ["key 'model.path' is required"]),
        (
            {"model": {**MODEL, "dtypo": "x"}},
            ["'model.dtypo'", "did you mean 'dtype'?", "allowed keys:", "max_model_len"],
        ),
        ({"model": MODEL, "cahce": {}}, ["'cahce'", "did you mean 'cache'?", "runtime"]),
        ({"model": MODEL, "cache": {"dtype": "fp8_e5m2"}}, ["'cache.dtype'", "'fp8_e5m2'", "'auto' or 'fp8'"]),
        ({"model": MODEL, "cache": {"dtype": "fp8", "scales": "1"}}, ["'cache.scales'", "'checkpoint' or 'measured'"]),
        (
            {"model": MODEL, "cache": {"scales": "measured"}},
            ["'cache'", "scales is measured, but dtype is auto, which has none; allowed with it: fp8"],
        ),
        ({"model": {**MODEL, "dtype": "int3"}}, ["'model.dtype'", "'int3'", "'float32'", "'bfloat16'"]),
        ({"model": {**MODEL, "sampling": {"temperature": -1}}}, ["'model.sampling.temperature'", "value -1"]),
        ({"model": {**MODEL, "sampling": {"top_p": 0}}}, ["'model.sampling.top_p'", "greater than 0"]),
        ({"model": {**MODEL, "sampling": {"top_k": -1}}}, ["'model.sampling.top_k'", "greater than or equal to 0"]),
        ({"model": {**MODEL, "sampling": {"min_p": 2}}}, ["'model.sampling.min_p'", "less than or equal to 1"]),
        ({"model": {**MODEL, "sampling": {"repetition_penalty": 3}}}, ["'model.sampling.repetition_penalty'", "2"]),
        ({"model": {**MODEL, "sampling": {"topp": 0.5}}}, ["'model.sampling.topp'", "did you mean 'top_p'?"]),
        (
            {"model": MODEL, "generation": {"defaults": "none"}},
            ["'generation.defaults'", "'model' or 'neutral'"],
        ),
        ({"model": MODEL, "generation": {"logprobs": "cooked"}}, ["'generation.logprobs'", "cooked"]),
        ({"model": MODEL, "generation": {"max_logprobs": -1}}, ["'generation.max_logprobs'", "value -1"]),
        ({"model": MODEL, "generation": {"logits_processors": [""]}}, ["'generation.logits_processors.0'", "value ''"]),
        ({"model": MODEL, "speculation": {"method": "guess"}}, ["'speculation.method'", "'ngram'", "'suffix'"]),
        ({"model": MODEL, "speculation": {"num_drafts": 16}}, ["'speculation.num_drafts'", "less than or equal to 15"]),
        ({"model": MODEL, "speculation": {"min_n": 0}}, ["'speculation.min_n'", "greater than or equal to 1"]),
        ({"model": MODEL, "speculation": {"max_n": 33}}, ["'speculation.max_n'", "less than or equal to 32"]),
        (
            {"model": MODEL, "speculation": {"method": "ngram", "min_n": 5, "max_n": 3}},
            ["'speculation'", "min_n (5) must be at most max_n (3) with method ngram"],
        ),
        ({"model": MODEL, "speculation": {"method": "eagle3"}}, ["'speculation'", "method eagle3 needs the path"]),
        (
            {"model": MODEL, "speculation": {"method": "mtp", "model": "x"}},
            ["'speculation'", "model is 'x', but method mtp takes none"],
        ),
        (
            {"model": MODEL, "parallel": {"pipeline": 2}, "speculation": {"method": "mtp"}},
            [
                "speculation.method is mtp, which needs parallel.pipeline 1, got 2",
                "several stages: none, grammar, ngram, suffix",
            ],
        ),
        (
            {"model": MODEL, "chat": {"template_kwargs": {"tools": []}}},
            ["'chat.template_kwargs'", "'tools' is a variable that the server sets itself"],
        ),
        ({"model": MODEL, "chat": {"template_timeout_s": 0}}, ["'chat.template_timeout_s'", "greater than 0"]),
        ({"model": MODEL, "chat": {"max_prompt_chars": 9}}, ["'chat.max_prompt_chars'", "1024"]),
        ({"model": MODEL, "chat": {"allow_request_templates": 3}}, ["'chat.allow_request_templates'", "boolean"]),
        ({"model": MODEL, "runtime": {"attention": "xformers"}}, ["'runtime.attention'", "'flash_attn'", "'torch'"]),
        ({"model": MODEL, "cache": {"block_size": 0}}, ["'cache.block_size'", "value 0", "greater than or equal to 1"]),
        ({"model": MODEL, "load": {"peer_timeout_s": 0}}, ["'load.peer_timeout_s'", "value 0", "greater than 0"]),
        ({"model": MODEL, "cache": {"gpu_memory_utilization": 1.5}}, ["'cache.gpu_memory_utilization'", "1.5"]),
        ({"model": MODEL, "cache": {"cpu_memory_gib": float("nan")}}, ["'cache.cpu_memory_gib'", "finite"]),
        (
            {"model": MODEL, "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 8}},
            ["'scheduler'", "max_num_batched_tokens (8) must be at least max_num_seqs (64)"],
        ),
        (
            {"model": MODEL, "parallel": {"gpu_type": "H200"}, "runtime": {"device": "cpu"}},
            ["parallel.gpu_type is H200, but runtime.device is cpu"],
        ),
        *(
            (
                {"model": MODEL | model, "runtime": {"deterministic": True, **runtime}},
                [f"{problem}, but runtime.deterministic is true; allowed with it: {allowed}"],
            )
            for model, runtime, problem, allowed in (
                ({"dtype": "float32"}, {}, "model.dtype is float32", "auto, bfloat16, float16"),
                ({"implementation": "transformers"}, {}, "model.implementation is transformers", "auto, raylm"),
                ({}, {"attention": "torch"}, "runtime.attention is torch", "auto, raylm"),
            )
        ),
        (
            {"model": MODEL, "runtime": {"deterministic": True, "device": "cpu"}},
            ["runtime.deterministic is true, but runtime.device is cpu; allowed there: false"],
        ),
        ([1, 2], ["(top level)", "[1, 2]"]),
    ],
)
def test_each_error_names_file_key_value_and_what_is_allowed(tmp_path: Path, data, parts):
    import yaml

    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError) as caught:
        load_yaml(EngineConfig, path)
    assert str(caught.value).startswith(str(path))
    for part in parts:
        assert part in str(caught.value)


def test_deterministic_is_refused_where_the_device_turns_out_to_be_a_cpu():
    config = EngineConfig.model_validate({"model": MODEL, "runtime": {"deterministic": True}})
    assert resolve(config, "cuda").runtime.deterministic
    with pytest.raises(ConfigError, match="runtime.deterministic is true, but runtime.device is cpu"):
        resolve(config, "cpu")


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot read"):
        load_yaml(EngineConfig, tmp_path / "nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: [")
    with pytest.raises(ConfigError, match="broken.yaml: not valid YAML"):
        load_yaml(EngineConfig, broken)


@pytest.mark.parametrize("method", ["none", "grammar", "suffix"])
def test_max_n_limits_what_reads_it_alone(method: str):
    speculation = {"method": method, "min_n": 8}
    assert EngineConfig.model_validate({"model": MODEL, "speculation": speculation}).speculation.min_n == 8


def test_a_configuration_never_changes():
    config = EngineConfig.model_validate({"model": MODEL})
    with pytest.raises(ValidationError):
        config.cache.block_size = 3


def test_an_application_reads_its_engine_file(tmp_path: Path):
    engine = tmp_path / "engine.yaml"
    engine.write_text("model: {path: smollm2-135m, name: tiny}\n")
    assert load_model({"engine": str(engine)}, source="test").engine.model.served_name == "tiny"
    engine.write_text("model: {path: smollm2-135m, nam: tiny}\n")
    with pytest.raises(ConfigError, match=r"engine\.yaml: key 'model\.nam' is unknown \(did you mean 'name'\?\)"):
        load_model({"engine": str(engine)}, source="test")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "key 'engine' is required"),
        ({"engine": "nowhere.yaml"}, "configuration file 'nowhere.yaml' not found"),
        ({"engine": {"model": MODEL}, "drain_timeout_s": -1}, "'drain_timeout_s' has the value -1"),
        ({"engine": {"model": MODEL}, "endpoint": "a b"}, "'endpoint' has the value 'a b'"),
        ({"engine": {"model": MODEL}, "endpoint": ""}, "'endpoint' has the value ''"),
        ({"engine": {"model": MODEL}, "num_replicas": 2}, "'num_replicas' is unknown; allowed keys: channel_host"),
        ({"engine": {"model": MODEL}, "channel_host": "moon"}, "'channel_host'.*'moon'.*'loopback'"),
    ],
)
def test_a_wrong_model_application_says_so(args, message):
    with pytest.raises(ConfigError, match=message):
        load_model(args, source="test")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"models": []}, "'models' is unknown; allowed keys: drain_timeout_s, endpoint, http, "),
        ({"drain_timeout_s": -1}, "'drain_timeout_s' has the value -1"),
        (
            {"http": {"api_keys_file": "keys.txt"}},
            r"'http\.api_keys_file' has the value 'keys\.txt': must be an absolute path",
        ),
        *(
            ({"responses": {"url": url}}, r"'responses\.url' has the value .*: " + problem)
            for url, problem in (
                ("mysql://host/raylm", "it must be sqlite:////absolute/path.db or postgresql://user@host/database"),
                ("sqlite:///relative.db", "it must be sqlite:////absolute"),
                ("sqlite://", "it must be sqlite:////absolute"),
                ("postgresql://", "it must be sqlite:////absolute"),
                ("postgresql://user:secret@host/raylm", "must not hold a password, because Serve shows"),
                ("postgresql://user@host/raylm?password=secret", "must not hold a password, because Serve shows"),
            )
        ),
        (
            {"responses": {"url_file": "url.txt"}},
            r"'responses\.url_file' has the value 'url\.txt': must be an absolute",
        ),
        ({"responses": {"url": "sqlite:////a.db", "url_file": "/url"}}, "url and url_file exclude each other"),
        ({"mcp": {"servers": {"x": {"url": "file:///etc/passwd"}}}}, r"'mcp\.servers\.x\.url' has the value 'file:"),
        ({"mcp": {"servers": {"x": {"url": "http://user:secret@host/mcp"}}}}, r"'mcp\.servers\.x\.url' has the value"),
        ({"mcp": {"servers": {"a b": {"url": "http://host/mcp"}}}}, r"'mcp\.servers\.a b"),
        (
            {"mcp": {"servers": {"x": {"url": "http://host/mcp", "authorization_file": "token"}}}},
            r"'mcp\.servers\.x\.authorization_file' has the value 'token': must be an absolute path",
        ),
        ({"mcp": {"timeout_s": 0}}, r"'mcp\.timeout_s' has the value 0"),
        ({"mcp": {"max_output_bytes": 1}}, r"'mcp\.max_output_bytes' has the value 1"),
        ({"mcp": {"max_rounds": 0}}, r"'mcp\.max_rounds' has the value 0"),
        ({"responses": {"expiry_days": 0}}, r"'responses\.expiry_days' has the value 0"),
        ({"responses": {"max_tenant_mib": 0}}, r"'responses\.max_tenant_mib' has the value 0"),
        *(
            ({"http": {"cors_origins": origins}}, r"'http\.cors_origins' has the value .*" + problem)
            for origins, problem in (
                (["https://a.example/"], r"'https://a\.example/' is no origin: scheme://host\[:port\]"),
                (["https://A.example"], "is no origin"),
                (["a.example"], "is no origin"),
                (["https://*.example"], "is no origin"),
                (["*", "https://a.example"], r"'\*' means every origin and must stand alone"),
            )
        ),
        ({"http": {"keep_alive_s": 0}}, r"'http\.keep_alive_s' has the value 0.*greater than 0"),
        *(
            ({"http": {name: value}}, rf"'http\.{name}' has the value {value}: input should be")
            for name, value in (
                ("max_messages", 0),
                ("max_content_parts", -1),
                ("max_stop_chars", 0),
                ("max_stop_token_ids", 0),
                ("max_fields", 0),
                ("max_json_values", 100_000),
                ("max_json_depth", 500),
            )
        ),
    ],
)
def test_a_wrong_ingress_application_says_so(args, message):
    with pytest.raises(ConfigError, match=message):
        load_ingress(args, source="test")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"header_timeout_s": 0}, "'header_timeout_s' has the value 0: input should be greater than 0"),
        ({"body_timeout_s": 3601}, "'body_timeout_s' has the value 3601.*3600"),
        ({"max_connections": 1}, "'max_connections' has the value 1.*2"),
        ({"max_connections_per_client": 0}, "'max_connections_per_client' has the value 0.*1"),
        ({"max_connections": 9, "max_connections_per_client": 10}, r"per_client is 10; allowed: up to .*\(9\)"),
        ({"trusted_proxies": ["10.0.0.0/33"]}, "'trusted_proxies'.*such as 10.0.0.0/8"),
        ({"trusted_proxies": ["proxy.example"]}, "'trusted_proxies'.*'proxy.example'"),
        ({"proxy_protocol": True}, "proxy_protocol wants trusted_proxies"),
        ({"keepalive": 3}, "'keepalive' is unknown"),
    ],
)
def test_wrong_limits_of_the_front_say_so(limits, message):
    with pytest.raises(ConfigError, match=message):
        parse(FrontConfig, limits, source="front.yaml")


def test_the_served_name_is_that_of_the_hub_or_the_paths_last_part():
    names = {"a/b/Qwen3-0.6B/": "Qwen3-0.6B", "/x/model.Q4_1.gguf": "model.Q4_1", "smollm2-135m": "smollm2-135m"}
    names |= {"Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B@main": "Qwen/Qwen3-0.6B"}
    names |= {"a/b:Q4_K_M": "a/b:Q4_K_M", "a/b@v1:Q4_K_M": "a/b:Q4_K_M", "./models/tiny": "tiny"}
    for path, name in names.items():
        assert EngineConfig.model_validate({"model": {"path": path}}).model.served_name == name


def test_parsing_survives_a_round_trip():
    model = load_model({"engine": {"model": MODEL}}, source="test")
    assert parse(ModelDeployment, model.model_dump(), source="again") == model


def test_models_that_are_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no config.json; allowed: a folder with config.json, a .gguf file"):
        locate(str(tmp_path))
    with pytest.raises(ConfigError, match="does not exist"):
        locate("no/such/model")


@pytest.mark.parametrize(("device", "rows", "budget", "timeout"), [("cpu", 64, 2048, 60), ("cuda", 1024, 8192, 10)])
def test_a_steps_size_and_time_are_by_default_the_devices(device, rows, budget, timeout):
    config = EngineConfig.model_validate({"model": MODEL, "scheduler": {"policy": "fair"}})
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (None, None)
    resolved = resolve(config, device)
    assert (resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens) == (rows, budget)
    assert (config.runtime.step_timeout_s, resolved.runtime.step_timeout_s) == (None, timeout)
    assert resolved.scheduler.policy == "fair" and resolved.model.path == config.model.path
    assert resolve(resolved, device) == resolved and resolved.runtime.device == device


@pytest.mark.parametrize(("given", "chunk"), [(None, 512), (2048, 2048)])
def test_prompts_come_in_chunks_where_clients_follow_their_answers(given, chunk):
    config = EngineConfig.model_validate({"model": MODEL, "scheduler": {"prefill_chunk": given}})
    assert resolve(config, "cpu").scheduler.prefill_chunk == given
    assert resolve(followed(config), "cpu").scheduler.prefill_chunk == chunk


def test_a_log_format_is_text_or_json():
    with pytest.raises(ConfigError, match=r"runtime\.log_format.*'text' or 'json'"):
        parse(EngineConfig, {"model": MODEL, "runtime": {"log_format": "xml"}}, source="test")


def test_a_given_step_timeout_stays():
    config = EngineConfig.model_validate({"model": MODEL, "runtime": {"step_timeout_s": 3}})
    assert resolve(config, "cpu").runtime.step_timeout_s == resolve(config, "cuda").runtime.step_timeout_s == 3
    with pytest.raises(ConfigError, match=r"runtime\.step_timeout_s"):
        parse(EngineConfig, {"model": MODEL, "runtime": {"step_timeout_s": 0}}, source="test")


def test_a_default_goes_with_the_number_that_is_given():
    def found(device, **scheduler):
        resolved = resolve(EngineConfig.model_validate({"model": MODEL, "scheduler": scheduler}), device).scheduler
        return resolved.max_num_seqs, resolved.max_num_batched_tokens

    assert [found(device, max_num_batched_tokens=128) for device in ("cpu", "cuda")] == [(64, 128), (128, 128)]
    assert found("cpu", max_num_seqs=4096) == (4096, 4096)
    assert found("cuda", max_num_seqs=16) == (16, 8192)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"path": "/models/x"}, (1.0, 1.0, 0, 0.0, 1.0)),
        ({"path": "/models/x.gguf"}, (1.0, 1.0, 0, 0.0, 1.0)),
        ({"path": "smollm2-135m"}, (0.2, 0.9, 0, 0.0, 1.0)),
        ({"path": "smollm2-135m", "sampling": {"temperature": 1, "top_k": 5}}, (1.0, 0.9, 5, 0.0, 1.0)),
        (
            {"path": "/models/x", "sampling": {"top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2}},
            (1.0, 0.8, 0, 0.1, 1.2),
        ),
    ],
)
def test_sampling_that_a_request_leaves_open_is_the_configurations_then_the_models_then_openais(model, expected):
    config = parse(EngineConfig, {"model": model}, source="test")
    assert sampling_defaults(config) == SamplingDefaults(*expected)
    assert sampling_defaults(resolve(config, "cpu")) == SamplingDefaults(*expected)


def _with_file(folder: Path, content: str, **sections: object) -> EngineConfig:
    (folder / "generation_config.json").write_text(content)
    return parse(EngineConfig, {"model": {"path": str(folder)}, **sections}, source="test")


ADVICE = '{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": null, "repetition_penalty": 1.1, "do_sample": true}'


def test_defaults_come_from_the_model_s_generation_config(tmp_path):
    config = _with_file(tmp_path, ADVICE)
    assert sampling_defaults(config) == SamplingDefaults(0.6, 0.95, 20, 0.0, 1.1)
    assert sampling_advice(config).origin == "generation_config.json"


def test_neutral_defaults_leave_the_model_s_advice_out(tmp_path):
    config = _with_file(tmp_path, ADVICE, generation={"defaults": "neutral"})
    assert sampling_defaults(config) == SamplingDefaults()
    demo = parse(EngineConfig, {"model": MODEL, "generation": {"defaults": "neutral"}}, source="test")
    assert sampling_defaults(demo) == SamplingDefaults()


def test_the_configuration_s_sampling_wins_over_the_model_s(tmp_path):
    (tmp_path / "generation_config.json").write_text(ADVICE)
    model = {"path": str(tmp_path), "sampling": {"temperature": 0.1}}
    assert sampling_defaults(parse(EngineConfig, {"model": model}, source="test")).fields() == {
        "temperature": 0.1,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"temperature": -1}', "key 'temperature' has the value -1"),
        ('{"top_k": "many"}', "key 'top_k' has the value 'many'"),
        ("[1]", "must hold a JSON object, got \\[1\\]"),
        ("{", "cannot be read"),
    ],
)
def test_a_generation_config_without_sense_is_refused(tmp_path, content, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        sampling_defaults(_with_file(tmp_path, content))
    assert "generation_config.json" in str(error.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "which cannot be read: No such file"),
        ("", "must be sqlite:////absolute/path.db or postgresql"),
        ("mysql://user:secret@host/raylm", "must be sqlite:////absolute/path.db or postgresql"),
    ],
)
def test_a_database_url_in_a_file_is_checked(content, problem, tmp_path):
    file = tmp_path / "url"
    if content is not None:
        file.write_text(content)
    config = load_ingress({"responses": {"url_file": str(file)}}, source="test").responses
    with pytest.raises(ConfigError, match=problem) as error:
        config.database_url()
    assert "secret" not in str(error.value)


def test_a_database_url_in_a_file_may_hold_a_password(tmp_path):
    (tmp_path / "url").write_text("postgresql://user:secret@host/raylm\n")
    config = load_ingress({"responses": {"url_file": str(tmp_path / "url")}}, source="test").responses
    assert config.database_url() == "postgresql://user:secret@host/raylm"


def test_responses_are_stored_in_the_users_state_folder(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert load_ingress({}, source="test").responses.database_url() == "sqlite:////state/raylm/responses.db"


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", "a" * 40])
def test_a_revision_is_part_of_the_name_on_the_hub(revision):
    model = EngineConfig.model_validate({"model": {"path": "a/b:Q4_0", "revision": revision}}).model
    found = hub_name(model.reference)
    assert found == HubName("a/b", revision, "Q4_0") and hub_name(str(found)) == found


@pytest.mark.parametrize("revision", ["", "../x", "a//b", "a..b", "a b", "-/", "a" * 300])
def test_what_is_no_revision_is_refused(revision):
    with pytest.raises(ConfigError, match=r"model\.revision"):
        parse(EngineConfig, {"model": {"path": "a/b", "revision": revision}}, source="test")


def test_a_revision_goes_with_a_name_on_the_hub_that_has_none():
    with pytest.raises(ConfigError, match=r"model\.path '/a' is no name of a model on the hub; allowed: null, or"):
        _ = EngineConfig.model_validate({"model": {"path": "/a", "revision": "v1"}}).model.reference
    with pytest.raises(ConfigError, match=r"model\.path 'a/b@v2' has a revision already"):
        _ = EngineConfig.model_validate({"model": {"path": "a/b@v2", "revision": "v1"}}).model.reference
