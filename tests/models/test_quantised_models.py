"""Quantised checkpoints of several families: names, experts, mixtures of formats, and what a whole engine answers."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm import LLM, EngineConfig, SamplingParams
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.fields import Fields
from raylm.models.load import checkpoint_digest
from raylm.models.quantised.join import join
from raylm.models.quantised.read_config import read_quantisation
from raylm.models.safetensors import file_tensors
from raylm.parallel.context import ParallelContext
from tests.models.paged import CPU, load
from tests.support import checkpoints
from tests.support.greedy import assert_greedy
from tests.support.quantised import (
    FILE,
    KINDS,
    Kind,
    awq,
    change_config,
    ct_packed,
    fp8,
    gptq,
    is_linear,
    nvfp4,
    write_both,
)


def assert_same(packed: Path, twin: Path, *, size: int = 1, implementation: str = "auto") -> None:
    """The parameters of every rank."""
    for rank in range(size):
        context = ParallelContext(rank, rank, size, 0, 1, CPU)
        found, expected = (
            dict(load(folder, context=context, implementation=implementation).named_parameters())
            for folder in (packed, twin)
        )
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=3e-7, atol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("family", "kind", "size"),
    [
        ("qwen2", "awq", 2),
        ("qwen3", "fp8_blocks", 2),
        ("gemma2", "nf4_nested", 1),
        ("gemma3", "ct_int8", 2),
        ("phi3", "gptq_4", 2),  # queries, keys and values in one tensor; gate and up too
        ("glm4", "ct_w4a16_zeros", 2),
        ("gpt_neox", "gptq_ordered", 2),  # queries, keys and values by heads
        ("bloom", "fp8", 2),
        ("cohere", "auto_round_awq", 2),  # rotary dimensions in pairs
        ("stablelm", "quark_fp8", 1),
        ("mixtral", "ct_w4a16", 2),  # experts of another naming
        ("qwen2_moe", "gptq_8_v2", 2),
        ("glm4_moe", "ct_fp8_channel", 2),
        ("olmoe", "modelopt_nvfp4", 1),
    ],
)
def test_families(tmp_path: Path, family: str, kind: str, size: int) -> None:
    layers = {} if family == "gemma3" else {"num_hidden_layers": 2}
    plain = checkpoints.FAMILIES[family](tmp_path / "plain", **layers)
    packed, twin = write_both(plain, tmp_path, KINDS[kind])
    quantised = [name for name, tensor in load_file(twin / FILE).items() if is_linear(name, tensor)]
    assert len(quantised) >= 8
    assert_same(packed, twin, size=size)


def test_a_layer_stored_as_in_out_is_not_turned(tmp_path: Path) -> None:
    """GPT-2's layers are [in, out]; whatever quantises them writes [out, in]."""
    plain = checkpoints.FAMILIES["gpt2"](tmp_path / "plain", num_hidden_layers=1)
    tensors = load_file(plain / FILE)
    name = next(name for name in tensors if name.endswith("h.0.mlp.c_fc.weight"))
    parts, dense = gptq(4, 32)(torch.Generator().manual_seed(0), *reversed(tensors[name].shape))
    save_file(tensors | {name: dense.t().contiguous()}, plain / FILE)
    expected = dict(load(plain).named_parameters())
    stored = {other: tensor for other, tensor in tensors.items() if other != name}
    module = name.removesuffix(".weight")
    save_file(stored | {f"{module}.{part}": tensor for part, tensor in parts.items()}, plain / FILE)
    change_config(plain, quantization_config=KINDS["gptq_4"].config)
    for parameter, value in load(plain).named_parameters():
        assert torch.equal(value, expected[parameter]), parameter


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "gptq_4"), ("qwen3", "fp8_blocks"), ("qwen2_moe", "awq")])
def test_models_through_transformers(tmp_path: Path, family: str, kind: str) -> None:
    plain = checkpoints.FAMILIES[family](tmp_path / "plain", num_hidden_layers=1)
    packed, twin = write_both(plain, tmp_path, KINDS[kind])
    assert_same(packed, twin, implementation="transformers")


def mixed(tmp_path: Path, packers: dict[str, Kind | None], config: dict[str, object]) -> tuple[Path, Path]:
    """A Llama whose layers are of the first kind whose pattern their name matches; others stay as they are."""
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=2)
    random = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    dense = load_file(plain / FILE)
    for name, tensor in load_file(plain / FILE).items():
        kind = next((kind for pattern, kind in packers.items() if re.search(pattern, name)), None)
        if kind is None or tensor.ndim != 2:
            stored[name] = tensor
            continue
        parts, dense[name] = kind.packer(random, *tensor.shape)
        stored |= {f"{name.removesuffix('.weight')}.{part}": found.contiguous() for part, found in parts.items()}
    twin = tmp_path / "twin"
    checkpoints.llama(twin, num_hidden_layers=2)
    save_file(dense, twin / FILE)
    save_file(stored, plain / FILE)
    change_config(plain, quantization_config=config)
    return plain, twin


def test_groups_of_several_formats(tmp_path: Path) -> None:
    """By a regular expression, by whole names and by class; the head among them, a layer left as it is."""
    weights = {"dynamic": False, "symmetric": True}
    groups = {
        "group_0": {
            "targets": ["re:.*self_attn\\.(q|k|v|o)_proj$"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", **weights},
        },
        "group_1": {
            "targets": ["model.layers.0.mlp.down_proj", "lm_head"],
            "format": "pack-quantized",
            "weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16, **weights},
        },
        "group_2": {
            "targets": ["Linear"],
            "format": "nvfp4-pack-quantized",
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, **weights},
        },
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    fp4 = Kind({}, nvfp4("weight_packed", "weight_global_scale", divides=True))
    packers = {
        r"layers\.1\.mlp\.up_proj": None,
        "self_attn": Kind({}, fp8(1, 0)),
        r"layers\.0\.mlp\.down_proj|lm_head": Kind({}, ct_packed(8, 16)),
        "mlp": fp4,
    }
    packed, twin = mixed(tmp_path, packers, config | {"ignore": ["model.layers.1.mlp.up_proj"]})
    assert_same(packed, twin, size=2)


def test_modelopts_mixture(tmp_path: Path) -> None:
    """Modules by the beginnings of their paths."""
    layers = {
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
        "model.layers.0.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.1": {"quant_algo": "FP8_PB_WO"},
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    packers = {
        r"layers\.0\.self_attn": Kind({}, fp8(0, 0, shape="number")),
        r"layers\.0\.mlp": Kind({}, nvfp4("weight", "weight_scale_2", divides=False)),
        r"layers\.1\.": Kind({}, fp8(128, 128, shape="4")),
    }
    packed, twin = mixed(tmp_path, packers, config)
    assert_same(packed, twin)


@pytest.mark.parametrize("name", ["gptq", "auto-round"])
def test_settings_of_single_layers(tmp_path: Path, name: str) -> None:
    if name == "gptq":
        own: dict[str, object] = {
            "dynamic": {r"+:.*layers\.1\..*": {"bits": 8, "group_size": 16, "desc_act": True}, r"-:.*o_proj": {}}
        }
    else:
        own = {"extra_config": {r".*layers\.1\..*": {"bits": 8, "group_size": 16}, "model.layers.0.x": {"bits": 16}}}
    config = {"quant_method": name, "bits": 4, "group_size": 32, "sym": False, "desc_act": False, **own}
    packers = {
        "o_proj": None,
        r"layers\.1\.": Kind({}, gptq(8, 16, ordered=name == "gptq")),
        r"layers\.0\.": Kind({}, gptq(4, 32)),
    }
    packed, twin = mixed(tmp_path, packers, config)
    assert_same(packed, twin)


def test_quarks_layers_of_their_own(tmp_path: Path) -> None:
    config = dict(KINDS["quark_mxfp4"].config)
    whole = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True}
    config["layer_quant_config"] = {"*self_attn*": {"weight": whole}, "*.up_proj": {"weight": None}}
    packers = {"up_proj": None, "self_attn": Kind({}, fp8(0, 0)), r"layers\.": KINDS["quark_mxfp4"]}
    packed, twin = mixed(tmp_path, packers, config)
    assert_same(packed, twin)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return write_both(checkpoints.llama(folder / "plain"), folder, KINDS["gptq_4"])


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("kind", ["awq", "fp8_blocks", "ct_w4a16", "nf4", "ct_nvfp4"])
def test_tokens_are_those_of_the_decoded_weights(tmp_path: Path, family: str, kind: str) -> None:
    plain = checkpoints.FAMILIES[family](tmp_path / "plain", num_hidden_layers=2)
    packed, twin = write_both(plain, tmp_path, KINDS[kind])
    prompt = [(5 * i + 3) % 300 + 3 for i in range(20)]
    (answer,) = answers(packed, [prompt])
    assert_greedy(checkpoints.reference(twin), prompt, answer)


def answers(folder: Path, prompts: list[list[int]], **model: object) -> list[list[int]]:
    sections = {"path": str(folder), "dtype": "float32", "max_model_len": 64, **model}
    config = EngineConfig.model_validate({"model": sections, "cache": {"num_blocks": 64}, "runtime": {"device": "cpu"}})
    llm = LLM(config, progress=False)
    try:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return [each.outputs[0].token_ids for each in llm.generate(prompts, greedy, progress=False)]
    finally:
        llm.close()


def test_the_log_says_that_they_are_decoded(llama: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="raylm"):
        load(llama[0], dtype=torch.bfloat16)
    lines = [record.getMessage() for record in caplog.records if "stored as" in record.getMessage()]
    assert lines == [
        "weights: stored as gptq (integers of 4 bits, groups of 32), decoded to bfloat16 while they are loaded: they "
        "take the memory of the latter"
    ]


def test_scales_of_activations_and_of_the_cache_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    attention = "model.layers.0.self_attn."
    names = ["k_scale", "v_scale", "attn.q_scale", "k_proj.k_scale", "k_proj.output_scale", "q_proj.input_zero_point"]
    more = {attention + name: torch.ones(1) for name in names}
    packed, twin = write_both(plain, tmp_path, KINDS["fp8"], changes=more)
    with caplog.at_level(logging.INFO, logger="raylm"):
        assert_same(packed, twin)
    assert "weights: 5 scales of a quantised KV cache are for cache.dtype fp8 alone" in caplog.messages


def test_only_the_cache_is_to_be_quantised(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    packed = tmp_path / "packed"
    shutil.copytree(plain, packed)
    scale = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(load_file(plain / FILE) | scale, packed / FILE)
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    for config in (
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": cache},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ):
        change_config(packed, quantization_config=config)
        assert_same(packed, plain)


@pytest.mark.parametrize("kind", ["gptq_4", "awq", "nf4"])
def test_pieces_are_small_whatever_the_tensor_is(tmp_path: Path, kind: str) -> None:
    """A weight of 4 million values is never whole in memory."""
    rows, columns = 4096, 1024
    if kind == "nf4":
        state = {"quant_type": "nf4", "blocksize": 64, "shape": [rows, columns]}
        parts = {
            "weight": torch.zeros(rows * columns // 2, 1, dtype=torch.uint8),
            "weight.absmax": torch.ones(rows * columns // 64),
            "weight.quant_map": torch.ones(16),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
    else:
        shape = (columns // 8, rows) if kind == "gptq_4" else (columns, rows // 8)
        parts = {
            "qweight": torch.zeros(shape, dtype=torch.int32),
            "qzeros": torch.zeros(columns // 32, rows // 8, dtype=torch.int32),
            "scales": torch.ones(columns // 32, rows).half(),
        }
    save_file({f"x.{name}": tensor for name, tensor in parts.items()}, tmp_path / FILE)
    fields = Fields({"quantization_config": KINDS[kind].config}, "config.json")
    quantisation = read_quantisation(fields, tmp_path, mxfp4=False)
    assert quantisation is not None
    (tensor,) = join(file_tensors(tmp_path / FILE, quantised=True), quantisation)
    sizes = [piece.numel() for _, piece in tensor.pieces(0, rows)]
    assert sum(sizes) == rows * columns and max(sizes) <= 1 << 20


def test_biases_of_zeros_that_the_model_has_not(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    bias = "model.layers.0.mlp.gate_proj.bias"
    packed, twin = write_both(plain, tmp_path, KINDS["gptq_4"], changes={bias: torch.zeros(96)})
    assert_same(packed, twin)
    save_file(load_file(packed / FILE) | {bias: torch.ones(96)}, packed / FILE)
    with pytest.raises(ConfigError, match="1 without a place in this model: model.layers.0.mlp.gate_proj.bias"):
        load(packed)


def test_its_digest_changes_with_it(llama: tuple[Path, Path], tmp_path: Path) -> None:
    for path in llama[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    source = locate(str(tmp_path))
    arch = ArchConfig.from_source(source)
    before = checkpoint_digest(source, arch, "auto", seed=0)
    tensors = load_file(tmp_path / FILE)
    tensors["model.layers.0.mlp.down_proj.qweight"][0, 0] ^= 1
    save_file(tensors, tmp_path / FILE)
    assert checkpoint_digest(source, arch, "auto", seed=0) != before


def test_torch_files_are_read_too(llama: tuple[Path, Path], tmp_path: Path) -> None:
    for path in llama[0].glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    torch.save(load_file(llama[0] / FILE), tmp_path / "pytorch_model.bin")
    assert_same(tmp_path, llama[1])


def test_modelopts_own_file_needs_no_field_of_config_json(tmp_path: Path) -> None:
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1)
    packed, _ = write_both(plain, tmp_path, KINDS["modelopt_fp8"])
    assert "quantization_config" not in json.loads((packed / "config.json").read_text())
    arch = ArchConfig.from_source(locate(str(packed)))
    assert str(arch.quantisation) == "modelopt (floats of 8 bits, a scale a tensor)"
    assert arch.quantisation is not None and arch.quantisation.ignored == ("lm_head",)


def test_awq_of_other_sizes(tmp_path: Path) -> None:
    """Rows of a rank that begin and end within a word of eight."""
    plain = checkpoints.llama(tmp_path / "plain", num_hidden_layers=1, intermediate_size=72)
    packed, twin = write_both(plain, tmp_path, Kind(KINDS["awq"].config | {"group_size": 8}, awq(8)))
    assert_same(packed, twin, size=2)
