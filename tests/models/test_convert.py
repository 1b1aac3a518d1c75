"""Conversion of checkpoints: the numbers against the formulas one by one, and that a folder is whole or not there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from bisect import bisect
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm import LLM, EngineConfig, SamplingParams
from raylm.errors import ConfigError
from raylm.model_files.aside import MARKER, SUFFIX, written_aside
from raylm.model_files.source import locate
from raylm.models.convert import Converted, convert
from raylm.models.quantised.encode import METHODS, Method
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, load
from tests.support import checkpoints
from tests.support.greedy import assert_greedy
from tests.support.quantised import FILE, KINDS, change_config, is_linear, write_both

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
BY_VALUE = sorted((code for code in range(256) if E4M3[code] == E4M3[code]), key=E4M3.__getitem__)
"""All codes but those of no number."""
GROUP = 32


HELIUM = {"num_hidden_layers": 1, "head_dim": 16}
"""A model without a family of raylm's."""


def run(folder: Path, out: Path, method: Method | None, **more: object) -> Converted:
    return convert(locate(str(folder)), out, method, group_size=GROUP, progress=False, **more)


def nearest_float8(value: float) -> float:
    """Of two that are equally near, the one with an even code."""
    place = bisect(BY_VALUE, value, key=E4M3.__getitem__)
    around = BY_VALUE[max(place - 1, 0) : place + 1]
    return E4M3[min(around, key=lambda code: (abs(E4M3[code] - value), code & 1))]


def rounded(weights: list[np.float32], method: Method, scale_type: torch.dtype) -> list[float]:
    """Weights that share a scale, rounded and decoded."""
    most, largest = max(abs(weight) for weight in weights), {"fp8": 448, "int8": 127, "int4": 7}[method]
    scale = np.float32(torch.tensor(most / np.float32(largest)).to(scale_type).item())
    if scale == 0:
        return [0.0] * len(weights)
    codes = [min(max(weight / scale, -largest), largest) for weight in weights]
    nearest = [nearest_float8(float(code)) if method == "fp8" else round(float(code)) for code in codes]
    return [float(np.float32(code) * scale) for code in nearest]


def naive(weight: Tensor, method: Method, scale_type: torch.dtype) -> Tensor:
    step = GROUP if method == "int4" else weight.shape[1]
    rows = [list(row) for row in weight.float().numpy()]
    return torch.tensor(
        [
            [x for at in range(0, len(row), step) for x in rounded(row[at : at + step], method, scale_type)]
            for row in rows
        ]
    )


def twin_of(plain: Path, folder: Path, method: Method, scale_type: torch.dtype = torch.float32) -> Path:
    """The checkpoint whose weights are what the quantised ones stand for."""
    twin = folder / "twin"
    twin.mkdir()
    for path in plain.iterdir():
        (twin / path.name).write_bytes(path.read_bytes())
    tensors = {
        name: naive(tensor, method, scale_type) if is_linear(name, tensor) else tensor.float()
        for name, tensor in load_file(plain / FILE).items()
    }
    save_file(tensors, twin / FILE)
    return twin


def assert_same(found: Path, expected: Path, *, size: int = 1) -> None:
    for rank in range(size):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        ours, theirs = (dict(load(folder, context=context).named_parameters()) for folder in (found, expected))
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=3e-7, atol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_are_those_of_the_formula(tmp_path: Path, family: str, method: Method) -> None:
    plain = checkpoints.FAMILIES[family](tmp_path / "plain", num_hidden_layers=1)
    tensors = load_file(plain / FILE)
    name = next(name for name, tensor in tensors.items() if is_linear(name, tensor))
    tensors[name][3] = 0  # a row without a scale
    tensors[name][4, 1:] = 0
    save_file(tensors, plain / FILE)
    converted = run(plain, tmp_path / "out", method)
    linear = [name for name, tensor in tensors.items() if is_linear(name, tensor)]
    assert (converted.num_quantised, converted.num_kept) == (len(linear), len(tensors) - len(linear))
    stored = load_file(tmp_path / "out" / FILE)
    for name, tensor in tensors.items():
        if name not in linear:
            assert torch.equal(stored[name], tensor), name
    assert_same(tmp_path / "out", twin_of(plain, tmp_path, method), size=2)


def test_scales_of_groups_have_the_type_of_the_model(tmp_path: Path) -> None:
    """And codes are of the scales as they are stored."""
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    run(plain, tmp_path / "out", "int4", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "out" / FILE)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16, torch.int32, torch.int64}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    twin = twin_of(plain, tmp_path, "int4", torch.bfloat16)
    tensors = load_file(twin / FILE)
    kept = {name: tensor if is_linear(name, tensor) else tensor.bfloat16().float() for name, tensor in tensors.items()}
    save_file(kept, twin / FILE)
    assert_same(tmp_path / "out", twin)


def test_what_the_configuration_says(tmp_path: Path) -> None:
    plain = checkpoints.FAMILIES["qwen3_moe"](tmp_path / "plain", num_hidden_layers=1)
    run(plain, tmp_path / "out", "fp8")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "float-quantized")
    group = section["config_groups"]["group_0"]
    assert (group["targets"], group["weights"]["strategy"]) == (["Linear"], "channel")
    assert group["input_activations"]["dynamic"] is True
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"} == set(section["ignore"])
    stored = load_file(tmp_path / "out" / FILE)
    weight, scale = (stored[f"model.layers.0.mlp.experts.0.up_proj.{end}"] for end in ("weight", "weight_scale"))
    assert (weight.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float32, (len(weight), 1))


def test_experts_in_one_tensor_stay_and_are_ignored(tmp_path: Path) -> None:
    plain = checkpoints.FAMILIES["granitemoe"](tmp_path / "plain", num_hidden_layers=1)
    assert run(plain, tmp_path / "out", "int8").num_quantised == 4
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {f"model.layers.0.block_sparse_moe.{name}_linear" for name in ("input", "output")} <= set(section["ignore"])
    load(tmp_path / "out")


def answers(folder: Path, prompt: list[int]) -> list[int]:
    sections = {"path": str(folder), "dtype": "float32", "max_model_len": 64}
    config = EngineConfig.model_validate({"model": sections, "cache": {"num_blocks": 64}, "runtime": {"device": "cpu"}})
    llm = LLM(config, progress=False)
    try:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (answer,) = llm.generate([prompt], greedy, progress=False)
        return answer.outputs[0].token_ids
    finally:
        llm.close()


@pytest.mark.parametrize(("family", "method"), [("llama", "int4"), ("qwen3_moe", "fp8")])
def test_tokens_are_those_of_the_rounded_weights(tmp_path: Path, family: str, method: Method) -> None:
    plain = checkpoints.FAMILIES[family](tmp_path / "plain", num_hidden_layers=2)
    run(plain, tmp_path / "out", method)
    prompt = [(5 * i + 3) % 300 + 3 for i in range(20)]
    assert_greedy(checkpoints.reference(twin_of(plain, tmp_path, method)), prompt, answers(tmp_path / "out", prompt))


def test_zero_biases_that_gptq_added_are_dropped_through_transformers_too(tmp_path: Path) -> None:
    plain = checkpoints.of_transformers("HeliumForCausalLM", tmp_path / "plain", **HELIUM)
    biases = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}
    packed, twin = write_both(plain, tmp_path, KINDS["gptq_4"], changes=biases)
    run(packed, tmp_path / "out", None)
    assert_same(tmp_path / "out", twin)
    run(twin, tmp_path / "rounded", "int4")
    assert_same(tmp_path / "rounded", twin_of(twin, tmp_path / "rounded", "int4"))


def test_an_image_encoder_is_kept_as_it_is(tmp_path: Path) -> None:
    """raylm does not load it; other programs do. Its zero biases are its own."""
    plain = checkpoints.FAMILIES["gemma3"](tmp_path / "plain")
    encoder = {
        "vision_tower.layers.0.q_proj.weight": torch.randn(4, 4),
        "vision_tower.layers.0.q_proj.bias": torch.zeros(4),
    }
    change_config(plain, architectures=["Gemma3ForConditionalGeneration"])
    packed, _ = write_both(plain, tmp_path, KINDS["ct_int8"], changes=encoder)
    for method in (None, "fp8"):
        run(packed, tmp_path / f"out-{method}", method)
        stored = load_file(tmp_path / f"out-{method}" / FILE)
        assert all(torch.equal(stored[name], tensor) for name, tensor in encoder.items())
    section = json.loads((tmp_path / "out-fp8" / "config.json").read_text())["quantization_config"]
    assert "vision_tower.layers.0.q_proj" in section["ignore"]


@pytest.mark.parametrize(("family", "kind"), [("llama", "awq"), ("llama", "gptq_4"), ("qwen3_moe", "fp8_blocks")])
def test_a_quantised_checkpoint_is_decoded(tmp_path: Path, family: str, kind: str) -> None:
    plain = checkpoints.FAMILIES[family](tmp_path / "plain", num_hidden_layers=1)
    biases = {"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)} if kind == "gptq_4" else {}
    packed, twin = write_both(plain, tmp_path, KINDS[kind], changes=biases)
    assert run(packed, tmp_path / "out", None).num_quantised == 0
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / FILE).values()} == {torch.float32}
    assert_same(tmp_path / "out", twin)
    run(packed, tmp_path / "again", "int8")
    assert_same(tmp_path / "again", twin_of(tmp_path / "out", tmp_path / "again", "int8"))


def test_shards(tmp_path: Path) -> None:
    """None is larger than the limit, and parts of a weight are in one file."""
    plain, limit = checkpoints.llama(tmp_path / "plain"), 100_000
    run(plain, tmp_path / "whole", "int4")
    run(plain, tmp_path / "out", "int4", shard_bytes=limit)
    index = json.loads((tmp_path / "out" / f"{FILE}.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert [path.name for path in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    found: dict[str, Tensor] = {}
    for path in files:
        tensors = load_file(path)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit
        assert all(index["weight_map"][name] == path.name for name in tensors)
        assert all(name.replace("_packed", "_scale") in tensors for name in tensors)
        found |= tensors
    whole = load_file(tmp_path / "whole" / FILE)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert found.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_other_files_are_copied(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain")
    (plain / "additional_chat_templates").mkdir()
    (plain / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (plain / "quantize_config.json").write_text(json.dumps(KINDS["gptq_4"].config))
    (plain / "consolidated.safetensors").write_bytes(b"the weights once more")
    run(plain, tmp_path / "out", None)
    left = {"consolidated.safetensors", "quantize_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in plain.iterdir()} - left
    for name in ("tokenizer.json", "generation_config.json", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (plain / name).read_bytes()


def test_torch_files_become_safetensors(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain")
    run(plain, tmp_path / "expected", "int8")
    torch.save(load_file(plain / FILE), plain / "pytorch_model.bin")
    (plain / FILE).unlink()
    run(plain, tmp_path / "out", "int8")
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert_same(tmp_path / "out", tmp_path / "expected")


_KILLED = """
import os, signal, sys
from pathlib import Path
from raylm.model_files.source import locate
from raylm.models import convert
written = 0
def write(folder, items, *, shard_bytes, advance):
    def count(num_bytes):
        global written
        written += 1
        if written == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    write_items(folder, items, shard_bytes=50_000, advance=count)
write_items, convert.write_items = convert.write_items, write
convert.convert(locate(sys.argv[1]), Path(sys.argv[2]), "int8", progress=False)
"""


def test_a_kill_leaves_no_half_model(tmp_path: Path) -> None:
    plain, out = checkpoints.llama(tmp_path / "plain"), tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", _KILLED, str(plain), str(out)], check=False)
    assert done.returncode == -signal.SIGKILL
    aside = tmp_path / f"out{SUFFIX}"
    assert not out.exists() and any(aside.glob("*.safetensors"))
    run(plain, out, "int8")
    assert not aside.exists() and not (out / MARKER).exists()
    run(plain, tmp_path / "other", "int8")
    assert_same(out, tmp_path / "other")


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = checkpoints.llama(tmp_path / "plain")
    whole, num_calls = os.pwrite, 0

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(descriptor, data[:1000], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ConfigError, match="out was not written: No space left on device"):
        run(plain, tmp_path / "out", "fp8")
    assert os.listdir(tmp_path) == ["plain"]


def damaged(plain: Path, value: float) -> str:
    tensors = load_file(plain / FILE)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][5, 7] = value
    save_file(tensors, plain / FILE)
    return name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, method: Method, value: float) -> None:
    plain = checkpoints.llama(tmp_path / "plain")
    name = damaged(plain, value)
    with pytest.raises(ConfigError, match=f"tensor {name} holds weights that are no finite numbers"):
        run(plain, tmp_path / "out", method)
    assert os.listdir(tmp_path) == ["plain"]


def test_numbers_that_a_type_cannot_have_are_refused(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain")
    name = damaged(plain, 1e6)
    with pytest.raises(ConfigError, match=f"tensor {name} holds numbers that float16 cannot have"):
        run(plain, tmp_path / "out", None, dtype=torch.float16)
    with pytest.raises(ConfigError, match=f"tensor {name} holds weights that are too large for scales of float16"):
        run(plain, tmp_path / "out", "int4", dtype=torch.float16)


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    plain, out = checkpoints.llama(tmp_path / "plain"), tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigError, match="out exists already"):
        run(plain, out, "fp8")
    out.rmdir()
    aside = tmp_path / f"out{SUFFIX}"
    aside.mkdir()
    (aside / "thesis.txt").write_text("of somebody")
    with pytest.raises(ConfigError, match="holds files of others"):
        run(plain, out, "fp8")
    assert (aside / "thesis.txt").exists()
    with pytest.raises(ConfigError, match="the folder .*missing does not exist"):
        run(plain, tmp_path / "missing" / "out", "fp8")


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    plain, out = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1), tmp_path / "out"
    with written_aside(out) as aside:
        (aside / "file").write_text("of the first")
        with pytest.raises(ConfigError, match="is being written by another process"):
            run(plain, out, "fp8")
    assert os.listdir(out) == ["file"]


def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    file = checkpoints.write_gguf(plain, tmp_path / "plain.gguf")
    with pytest.raises(ConfigError, match=r"plain\.gguf: a GGUF file cannot be converted; allowed: a folder"):
        run(file, tmp_path / "out", "fp8")
    with pytest.raises(ConfigError, match=r"rows of 96 values, which groups of 128 cannot.*: --group-size 32$"):
        convert(locate(str(plain)), tmp_path / "out", "int4", group_size=128, progress=False)
    (plain / FILE).rename(plain / "consolidated.safetensors")
    with pytest.raises(ConfigError, match="Mistral's own format cannot be converted"):
        run(plain, tmp_path / "out", "fp8")
    turned = checkpoints.FAMILIES["gpt2"](tmp_path / "gpt2", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="no matrices of linear layers that fp8 could quantise"):
        run(turned, tmp_path / "out", "fp8")
    change_config(turned, quantization_config=KINDS["ct_int8"].config)
    tensors = load_file(turned / FILE)
    name = next(name for name in tensors if name.endswith("h.0.mlp.c_fc.weight"))
    parts, _ = KINDS["ct_int8"].packer(torch.Generator().manual_seed(0), *tensors.pop(name).shape[::-1])
    module = name.removesuffix(".weight")
    save_file(tensors | {f"{module}.{end}": part for end, part in parts.items()}, turned / FILE)
    with pytest.raises(ConfigError, match=rf"{name} is quantised as \[out, in\]"):
        run(turned, tmp_path / "out", None)
