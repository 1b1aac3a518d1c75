"""What quantised checkpoints may not be: sentences that name the field or the tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from raylm.config.engine import EngineConfig, Quantization
from raylm.config.engine_keys import engine_sections
from raylm.errors import ConfigError
from raylm.models.check import check_model
from raylm.models.fields import Fields
from raylm.models.quantised.grid import LessOneZeros
from raylm.models.quantised.patterns import Names
from raylm.models.quantised.read_config import read_quantisation
from raylm.models.safetensors import file_tensors
from tests.models.paged import load
from tests.models.reads import share_of_second_half
from tests.support import checkpoints
from tests.support.quantised import FILE, KINDS, change_config, compressed, pack_columns, quark, write_both

MODULE = "model.layers.0.self_attn.q_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
TWO_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["re:(?!model).*"], "weights": INT4},
        "group_1": {"targets": ["Linear"], "weights": INT4 | {"group_size": 16}},
    },
}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'; allowed: fp8, .*, or a .gguf file$"),
        ({"quant_method": ["gptq"]}, "quant_method is .*; allowed: fp8"),
        ({"bits": 4}, "quant_method is None; allowed: fp8"),
        ("gptq", "quantization_config is 'gptq'; allowed: a mapping"),
        (GPTQ | {"bits": 5}, "bits is 5; allowed: one of 2, 3, 4, 8"),
        (GPTQ | {"bits": None}, "bits is missing"),
        (GPTQ | {"group_size": 0}, "group_size is 0; allowed: a positive integer"),
        (GPTQ | {"group_size": -2}, "group_size is -2; allowed: a positive integer"),
        (GPTQ | {"group_size": True}, "group_size is True; allowed: a positive integer"),
        (GPTQ | {"group_size": 10**6}, r"group_size is 1000000; allowed: -1 \(all of a row\), or 1 to 65536"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; allowed: one of gptq, gptq_v2"),
        (GPTQ | {"format": "gptq_p"}, "format is 'gptq_p'; allowed: one of gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True; allowed: false"),
        (GPTQ | {"dynamic": {".*": {"bits": 7}}}, r"dynamic: \.\*: bits is 7; allowed"),
        (GPTQ | {"dynamic": {"[": {"bits": 8}}}, r"'\[' is no regular expression that raylm reads"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; allowed: one of gemm"),
        (AWQ | {"checkpoint_format": "gemv_fast"}, "checkpoint_format is 'gemv_fast'; allowed: one of gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False; allowed: true"),
        (AWQ | {"bits": 8}, "bits is 8; allowed: one of 4"),
        (AWQ | {"modules_to_not_convert": [3]}, r"modules_to_not_convert is \[3\]; allowed: a list of names"),
        (ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format is .*; allowed: one of auto_round:"),
        (ROUND | {"packing_format": "auto_round:gptq"}, "sym is False; allowed: true, or the packing_format"),
        (ROUND | {"data_type": "mx_fp"}, "data_type is 'mx_fp'; allowed: one of int"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]; allowed: a list"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128; allowed: a list"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype is 'fp4'; allowed: one of fp8"),
        (compressed("marlin-24", **INT4), "format is 'marlin-24'; allowed: one of float-quantized"),
        (compressed("mixed-precision", **INT4), "group_0: format is None; allowed: .*: the whole is mixed-precision"),
        (compressed("pack-quantized", **INT4) | {"config_groups": {}}, "config_groups is {}; allowed: a mapping"),
        (
            compressed("pack-quantized", **INT4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: format is 'sparse-24-bitmask'; allowed: one of dense",
        ),
        (
            compressed("pack-quantized", **INT4) | {"transform_config": {"config_groups": {"u": {}}}},
            "transform_config is 'there'; allowed: none",
        ),
        (compressed("pack-quantized", **INT4 | {"num_bits": 3}), "num_bits is 3; allowed: one of 2, 4, 8"),
        (compressed("pack-quantized", **INT4 | {"type": "float"}), "type is 'float'; allowed: one of int"),
        (compressed("pack-quantized", **INT4 | {"strategy": "token"}), "strategy is 'token'; allowed: one of tensor"),
        (
            compressed("pack-quantized", **INT4 | {"group_size": None}),
            "group_size is None; allowed: a positive integer, as the strategy is group",
        ),
        (compressed("nvfp4-pack-quantized", **FP4 | {"group_size": 32}), "group_size is 32; allowed: 16"),
        (
            compressed("float-quantized", num_bits=8, type="float", symmetric=False),
            "symmetric is False; allowed: true: floats have no zero point",
        ),
        (TWO_GROUPS, "'.*' is no regular expression that raylm reads: look-around"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; allowed: one of FP8"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "kv_cache_quant_algo": "FP8"},
            "quant_algo is 'NVFP4_AWQ'; allowed: one of FP8",
        ),
        ({"quant_method": "modelopt"}, "quant_algo is None; allowed: one of FP8"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "group_size is 32; allowed: 16, as quant_algo is NVFP4",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "quantized_layers is None; allowed: a mapping",
        ),
        (quark(dtype="int4", qscheme="per_group"), "dtype is 'int4'; allowed: one of fp8_e4m3, int8, fp4"),
        (quark(dtype="int8", qscheme="per_channel", symmetric=False), "symmetric is False; allowed: true"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}]}},
            "weight is .*; allowed: one type of numbers",
        ),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is None; allowed: true, or load_in_8bit true"),
    ],
)
def test_configurations(tmp_path: Path, config: dict[str, object] | str, sentence: str) -> None:
    fields = Fields({"quantization_config": config}, "config.json")
    with pytest.raises(ConfigError, match=sentence):
        read_quantisation(fields, tmp_path, mxfp4=False)


def test_none_and_the_first_name_of_the_field(tmp_path: Path) -> None:
    assert read_quantisation(Fields({}, "config.json"), tmp_path, mxfp4=False) is None
    old = {"compression_config": compressed("pack-quantized", **INT4) | {"quant_method": "sparseml"}}
    found = read_quantisation(Fields(old, "config.json"), tmp_path, mxfp4=False)
    assert found is not None and found.method == "compressed-tensors"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("plain"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def packed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Written once for each kind; a copy for the test."""
    written: dict[str, Path] = {}

    def copied(kind: str, folder: Path) -> Path:
        if kind not in written:
            written[kind], _ = write_both(plain, tmp_path_factory.mktemp(kind), KINDS[kind])
        return shutil.copytree(written[kind], folder / "copy")

    return copied


NAN, BYTES = float("nan"), torch.uint8


@pytest.mark.parametrize(
    ("kind", "part", "value", "sentence"),
    [
        (
            "fp8",
            "weight_scale",
            None,
            "q_proj.weight_scale or weight_scale_inv is missing, which a weight of floats",
        ),
        ("fp8", "weight", None, "q_proj.weight is missing"),
        ("fp8", "weight_scale", torch.tensor(NAN), "q_proj.weight_scale holds scales that are no finite numbers"),
        ("fp8", "weight_scale", torch.tensor(-1.0), "q_proj.weight_scale holds negative scales; allowed: 0 and above"),
        ("fp8", "weight_scale", torch.ones(64, 1), r"weight_scale has shape \(64, 1\); allowed: \(1, 1\)"),
        ("fp8", "weight_scale", torch.ones(0), r"weight_scale has shape \(0,\); allowed: \(1, 1\)"),
        ("fp8", "weight_scale", torch.ones(1, dtype=torch.int32), "weight_scale has type int32; allowed: float32"),
        ("fp8", "weight", torch.ones(64, 64), "q_proj.weight has type float32; allowed: float8_e4m3fn, float8_e5m2"),
        ("fp8", "weight", torch.ones(2, 64, 64).to(torch.float8_e4m3fn), r"weight has shape \(2, 64, 64\); allowed: a"),
        ("fp8", "weight", torch.ones(64, 32).to(torch.float8_e4m3fn), r"of another shape: .*q_proj.weight \(64, 32\)"),
        ("fp8", "weight", torch.ones(0, 64).to(torch.float8_e4m3fn), r"weight has shape \(0, 64\); allowed: a matrix"),
        ("fp8", "qweight", torch.ones(8, 64, dtype=torch.int32), "q_proj.qweight is no part of a weight of floats"),
        ("fp8_blocks", "weight_scale_inv", torch.ones(2, 2), r"weight_scale_inv has shape \(2, 2\); allowed: \(3, 2\)"),
        ("ct_mxfp8", "weight_scale", torch.full((64, 2), 255, dtype=BYTES), "weight_scale holds scales that are no"),
        ("ct_int8", "weight", torch.zeros(64, 64, dtype=BYTES), "weight has type uint8; allowed: int8"),
        ("ct_int8_zeros", "weight_zero_point", None, "q_proj.weight_zero_point is missing"),
        ("ct_w4a16", "weight_shape", torch.tensor([64, 96]), r"weight_packed has shape \(64, 8\); allowed: \(64, 12\)"),
        ("ct_w4a16", "weight_shape", torch.tensor([64, -1]), r"weight_shape is \[64, -1\]; allowed: two positive"),
        ("ct_w4a16", "weight_shape", torch.tensor([2**40, 2**40]), "weight_shape is .*; allowed: two positive"),
        ("ct_w4a16", "weight_scale", torch.ones(64, 3), r"weight_scale has shape \(64, 3\); allowed: \(64, 2\)"),
        ("ct_w4a16_zeros", "weight_zero_point", torch.zeros(8, 3, dtype=torch.int32), r"\(8, 3\); allowed: \(8, 2\)"),
        ("ct_w4a16_ordered", "weight_g_idx", None, "q_proj.weight_g_idx is missing"),
        ("ct_w4a16_ordered", "weight_g_idx", torch.full((64,), 2, dtype=torch.int32), "names group 2; allowed: 0 to 1"),
        ("gptq_ordered", "g_idx", torch.full((64,), -1, dtype=torch.int32), "g_idx names group -1; allowed: 0 to 1"),
        ("gptq_ordered", "g_idx", torch.zeros(63, dtype=torch.int32), r"g_idx has shape \(63,\); allowed: \(64, 1\)"),
        ("gptq_4", "scales", None, "q_proj.scales is missing"),
        ("gptq_4", "scales", torch.full((2, 64), torch.inf), "q_proj.scales holds scales that are no finite numbers"),
        ("gptq_4", "qzeros", torch.zeros(1, 8, dtype=torch.int32), r"qzeros has shape \(1, 8\); allowed: \(2, 8\)"),
        ("gptq_4", "qweight", torch.zeros(9, 64, dtype=torch.int32), r"(qzeros|scales) has shape .*; allowed: \(3, "),
        ("gptq_3", "qweight", torch.zeros(7, 64, dtype=torch.int32), "qweight has 7 rows; allowed: a multiple of 3"),
        ("awq", "qzeros", None, "q_proj.qzeros is missing"),
        ("awq", "qweight", torch.zeros(64, 9, dtype=torch.int32), r"qzeros has shape \(2, 8\); allowed: \(2, 9\)"),
        ("ct_nvfp4", "weight_global_scale", None, "q_proj.weight_global_scale or weight_scale_2 is missing"),
        ("ct_nvfp4", "weight_global_scale", torch.zeros(1), "weight_global_scale is 0.0; allowed: a number above 0"),
        ("ct_nvfp4", "weight_global_scale", torch.tensor(NAN), "weight_global_scale is nan; allowed: a number above 0"),
        ("ct_nvfp4", "weight_scale", torch.ones(64, 4), "weight_scale has type float32; allowed: float8_e4m3fn"),
        ("ct_mxfp4", "weight_scale", torch.full((64, 1), 1, dtype=BYTES), r"\(64, 1\); allowed: \(64, 2\)"),
        ("bnb8", "SCB", torch.full((64,), -1.0), "q_proj.SCB holds negative scales"),
        ("bnb8", "weight_format", torch.tensor(1, dtype=BYTES), "weight_format names an order of elements"),
        ("nf4", "weight.absmax", torch.ones(3), "absmax has 3 numbers; allowed: 128"),
        ("nf4", "weight.quant_map", torch.ones(8), r"quant_map has shape \(8,\); allowed: \(1, 16\)"),
        ("nf4", "weight.quant_map", torch.full((16,), NAN), "quant_map holds values that are no finite numbers"),
        ("nf4", "weight", torch.zeros(5, 1, dtype=BYTES), "q_proj.weight has 5 bytes; allowed: 2048"),
        ("nf4_nested", "weight.nested_absmax", torch.ones(2), r"nested_absmax has shape \(2,\); allowed: \(1, 16\)"),
        ("nf4_nested", "weight.nested_absmax", None, "q_proj.weight.nested_absmax is missing"),
        ("nf4_nested", "weight.nested_absmax", torch.full((16,), -1.0), "nested_absmax holds negative scales"),
        ("nf4_nested", "weight.nested_absmax", torch.full((16,), 99.0), "weight.absmax holds negative scales"),
    ],
)
def test_tensors(packed: Any, tmp_path: Path, kind: str, part: str, value: Tensor | None, sentence: str) -> None:
    folder = packed(kind, tmp_path)
    tensors = load_file(folder / FILE) | ({f"{MODULE}.{part}": value} if value is not None else {})
    if value is None:
        del tensors[f"{MODULE}.{part}"]
    save_file(tensors, folder / FILE)
    with pytest.raises(ConfigError, match=sentence):
        load(folder)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (b"[]", "quant_state.bitsandbytes__nf4 is no JSON object"),
        (b"\xff", "quant_state.bitsandbytes__nf4 is no JSON object"),
        (b"{}", "shape is None; allowed: two positive integers"),
        ({"shape": [64]}, r"shape is \[64\]; allowed: two positive integers"),
        ({"shape": [2**30, 2**30]}, "shape is .*; allowed: two positive integers"),
        ({"shape": [64, 64.0]}, "shape is .*; allowed: two positive integers"),
        ({"blocksize": 0}, "blocksize is 0; allowed: a positive integer"),
        ({"nested_blocksize": -1}, "nested_blocksize is -1; allowed: a positive integer"),
        ({"nested_offset": "0"}, "nested_offset is '0'; allowed: a number of 0 or above"),
    ],
)
def test_what_bitsandbytes_says_of_a_weight(
    packed: Any, tmp_path: Path, state: bytes | dict[str, object], sentence: str
) -> None:
    folder = packed("nf4_nested", tmp_path)
    name, tensors = f"{MODULE}.weight.quant_state.bitsandbytes__nf4", load_file(folder / FILE)
    if isinstance(state, dict):
        state = json.dumps(json.loads(bytes(tensors[name].tolist())) | state).encode()
    save_file(tensors | {name: torch.tensor(list(state), dtype=torch.uint8)}, folder / FILE)
    with pytest.raises(ConfigError, match=sentence):
        load(folder)


def test_a_module_that_the_configuration_does_not_name(packed: Any, tmp_path: Path) -> None:
    folder = packed("ct_w4a16", tmp_path)
    config = json.loads(json.dumps(TWO_GROUPS))
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp"]
    config["config_groups"]["group_1"]["targets"] = ["model.layers.7"]
    change_config(folder, quantization_config=config)
    with pytest.raises(ConfigError, match="k_proj.* is quantised, but the configuration does not say how"):
        load(folder)


def test_tensors_that_are_no_part_of_a_weight(packed: Any, tmp_path: Path) -> None:
    folder = packed("fp8", tmp_path)
    tensors = load_file(folder / FILE)
    save_file(tensors | {"model.norm.other": torch.zeros(64, dtype=torch.int32)}, folder / FILE)
    with pytest.raises(ConfigError, match="model.norm.other has type int32; allowed: float32, float16"):
        load(folder)
    save_file(tensors | {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, folder / FILE)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \(64,\); allowed: a matrix"):
        load(folder)


def test_quantised_tensors_of_a_plain_checkpoint(packed: Any, tmp_path: Path) -> None:
    folder = packed("fp8", tmp_path)
    change_config(folder, quantization_config=None)
    with pytest.raises(ConfigError, match="has type F8_E4M3; allowed: F32"):
        load(folder)


def test_a_file_that_is_cut_short(packed: Any, tmp_path: Path) -> None:
    folder = packed("gptq_4", tmp_path)
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])
    with pytest.raises(ConfigError, match="it is cut short"):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "share"), [("fp8_blocks", 0.51), ("gptq_4", 0.7), ("ct_w4a16", 0.7), ("nf4", 0.7), ("ct_nvfp4", 0.51)]
)
def test_a_rank_reads_its_columns_alone(
    packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, share: float
) -> None:
    """Half of the codes, and the scales of the groups that the half touches: 2 of 3."""
    folder = packed(kind, tmp_path)
    assert 0.3 < share_of_second_half(folder, monkeypatch) < share


def test_zero_points_that_borrowed_from_their_neighbours(tmp_path: Path) -> None:
    """GPTQ's first format subtracts 1 of every zero point by one subtraction of the word."""
    zeros = torch.tensor([[0, 0, 5, 15, 0, 8, 1, 0]]).t()  # [8 rows, 1 group]
    word = int(pack_columns(zeros, 4)[0, 0]) - 0x11111111
    save_file({"qzeros": torch.tensor([[word]]).to(torch.int32)}, tmp_path / "x.safetensors")
    (tensor,) = file_tensors(tmp_path / "x.safetensors", quantised=True)
    assert LessOneZeros(tensor, 4).read((0, 8), (0, 1)).int().equal(zeros.int())


@pytest.mark.parametrize(
    ("name", "module", "is_match"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head2", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("re:.*mlp.gate$", "model.layers.3.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.3.mlp.gate_proj", False),
        ("re:layers", "model.layers.3", False),
        ("*lm_head*", "lm_head", True),
        ("model.layers.0*", "model.layers.0.mlp.up_proj", True),
        ("Linear", "model.layers.0.mlp.up_proj", False),
    ],
)
def test_names_of_modules(name: str, module: str, is_match: bool) -> None:
    names = Names([name])
    assert names.match(module) is is_match
    assert names.means_all is (name == "Linear")


def test_a_pattern_that_would_take_for_ever() -> None:
    """Python's own expressions take time that doubles with each letter of this one."""
    assert not Names([r"re:(a+)+$"]).match("a" * 5000 + "b")
    with pytest.raises(ConfigError, match="a name of 1500 characters; allowed: at most 1000"):
        Names(["re:" + "a" * 1500])
    with pytest.raises(ConfigError, match="300 names with wildcards; allowed: at most 256"):
        Names([f"x{number}*" for number in range(300)])


def test_the_quantisation_that_is_asked_for(packed: Any, plain: Path, tmp_path: Path) -> None:
    def check(path: Path, quantization: str) -> None:
        given = engine_sections({"quantization": quantization}, source="test")
        check_model(EngineConfig.model_validate({"model": {"path": str(path), **given["model"]}}))

    folder = packed("gptq_4", tmp_path)
    for name in ("gptq", "gptq_marlin"):
        check(folder, name)
    with pytest.raises(ConfigError, match="model.quantization is awq; allowed for this model: gptq"):
        check(folder, "awq_marlin")
    check(plain, "fp8")  # it is quantised while it is loaded
    with pytest.raises(ConfigError, match="quantization is gptq; allowed for this model: fp8, .* is not quantised"):
        check(plain, "gptq")
    with pytest.raises(ConfigError, match="model.quantization is fp8; allowed for this model: gptq"):
        check(folder, "fp8")


def test_all_methods_can_be_asked_for(tmp_path: Path) -> None:
    fields = Fields({"quantization_config": {"quant_method": "none of them"}}, "config.json")
    with pytest.raises(ConfigError) as refused:
        read_quantisation(fields, tmp_path, mxfp4=True)
    allowed = str(refused.value).partition("allowed: ")[2].removesuffix(", or a .gguf file").split(", ")
    assert allowed == list(get_args(Quantization))
