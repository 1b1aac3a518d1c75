"""What checkpoints of TorchAO may not be: sentences that name the field or the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models.fields import Fields
from raylm.models.quantised.read_config import read_quantisation
from tests.models.paged import load
from tests.support import checkpoints
from tests.support.quantised import FILE, write_both
from tests.support.torchao import KINDS, PER_ROW, PER_TENSOR, by_name, config, metadata_of, per_group, rewrite

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("granularity", "shared"),
    [
        (PER_TENSOR, (0, 0)),
        ([PER_TENSOR, PER_ROW], (1, 0)),
        ({"_type": "PerAxis", "_data": {"axis": 0}}, (1, 0)),
        ({"_type": "PerAxis", "_data": {"axis": 1}}, (0, 1)),
        ({"_type": "PerRow", "_data": {"dim": 0}}, (0, 1)),
        (per_group(64), (1, 64)),
        ({"_type": "PerBlock", "_data": {"block_size": [128, 128]}}, (128, 128)),
        (None, (1, 0)),
    ],
)
def test_granularities(tmp_path: Path, granularity: object, shared: tuple[int, int]) -> None:
    fields = Fields({"quantization_config": config("Int8WeightOnlyConfig", granularity=granularity)}, "config.json")
    found = read_quantisation(fields, tmp_path, mxfp4=False)
    assert found is not None and [(scheme.rows, scheme.columns) for scheme in found.schemes] == [shared]


@pytest.mark.parametrize("packing", ["preshuffled", "plain_int32", "opaque", 3])
def test_packings_for_the_kernels_of_one_kind_of_device(tmp_path: Path, packing: object) -> None:
    check_refused(
        tmp_path,
        config("Int4WeightOnlyConfig", int4_packing_format=packing),
        "int4_packing_format is .*; allowed: one of plain, tile_packed_to_4d: others are for the kernels of one kind",
    )


@pytest.mark.parametrize(
    ("configuration", "sentence"),
    [
        (
            {"quant_type": "int4_weight_only"},
            "quant_type is 'int4_weight_only'; allowed: a mapping, as newer programs write it; quantise the original",
        ),
        ({"quant_type": None}, "quant_type: default is None; allowed: one of TorchAO's configurations"),
        ({"quant_type": [1]}, r"quant_type is \[1\]; allowed: a mapping"),
        ({"quant_type": {"default": "int8"}}, "default is 'int8'; allowed: a mapping"),
        (config("NVFP4WeightOnlyConfig"), "_type is 'NVFP4WeightOnlyConfig'; allowed: one of Int4WeightOnlyConfig"),
        (config("AWQConfig", base_config={}), "_type is 'AWQConfig'; allowed: one of Int4WeightOnlyConfig"),
        (
            config("Float8DynamicActivationInt4WeightConfig"),
            "int4_packing_format is 'preshuffled'; allowed: one of plain",
        ),
        (
            config("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d", int4_tile_packed_ntile=16),
            "int4_tile_packed_ntile is 16; allowed: 8: other tiles are those of AMD's GPUs",
        ),
        (config("Int4WeightOnlyConfig", group_size=0), "group_size is 0; allowed: a positive integer"),
        (
            config("Float8DynamicActivationFloat8WeightConfig", packing_format={"_data": "SPARSE_1D_DATA_1D_METADATA"}),
            "packing_format is 'sparse_1d_data_1d_metadata'; allowed: one of plain",
        ),
        (
            config("IntxWeightOnlyConfig", intx_packing_format="opaque_torchao_auto"),
            "intx_packing_format is 'opaque_torchao_auto'; allowed: one of unpacked_to_int8",
        ),
        (
            config("IntxWeightOnlyConfig", weight_dtype={"_data": "int9"}),
            "weight_dtype is 'int9'; allowed: one of int1",
        ),
        (
            config("Int8WeightOnlyConfig", granularity={"_type": "PerToken"}),
            "granularity: _type is 'PerToken'; allowed: one of PerTensor",
        ),
        (by_name({}), "module_fqn_to_config is {}; allowed: a mapping of modules"),
        (by_name({"a": {"_type": "X"}}), "a: _type is 'X'; allowed: one of Int4WeightOnlyConfig"),
        (
            config("Int8WeightOnlyConfig") | {"modules_to_not_convert": [3]},
            r"modules_to_not_convert is \[3\]; allowed: a list of names",
        ),
    ],
)
def test_configurations(tmp_path: Path, configuration: dict[str, object], sentence: str) -> None:
    check_refused(tmp_path, configuration, sentence)


def check_refused(folder: Path, configuration: dict[str, object], sentence: str) -> None:
    fields = Fields({"quantization_config": {"quant_method": "torchao"} | configuration}, "config.json")
    with pytest.raises(ConfigError, match=sentence):
        read_quantisation(fields, folder, mxfp4=False)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A copy for the test; written once for each kind."""
    plain = checkpoints.llama(tmp_path_factory.mktemp("plain"), num_hidden_layers=1)
    files: dict[str, tuple[Path, bytes]] = {}

    def fresh(kind: str) -> Path:
        if kind not in files:
            folder, _ = write_both(plain, tmp_path_factory.mktemp(kind), KINDS[kind])
            files[kind] = folder, (folder / FILE).read_bytes()
        folder, data = files[kind]
        (folder / FILE).write_bytes(data)
        return folder

    return fresh


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "part", "value", "sentence"),
    [
        ("ao_int8", "scale", None, "q_proj._weight_.* is there, but .*q_proj._weight_scale is missing, .* Int8Tensor"),
        ("ao_int8", "qdata", None, "q_proj._weight_qdata is missing, which a weight of class Int8Tensor needs"),
        ("ao_int8", "zero_point", None, "q_proj._weight_zero_point is missing"),
        ("ao_int8", "scale", torch.full((64, 1), NAN), "q_proj._weight_scale holds scales that are no finite numbers"),
        ("ao_int8", "scale", -torch.ones(64, 1), "q_proj._weight_scale holds negative scales"),
        ("ao_int8", "scale", torch.ones(64, 2), r"_weight_scale has shape \(64, 2\); allowed: \(64, 1\)"),
        ("ao_int8", "qdata", torch.zeros(64, 64), "_weight_qdata has type float32; allowed: int8"),
        ("ao_int8", "qdata", torch.zeros(4, 64, 64).to(torch.int8), r"_qdata is of a weight of shape \[4, 64, 64\]"),
        ("ao_int8", "act_pre_scale", torch.ones(64), r"_weight_act_pre_scale multiplies activations \(AWQ"),
        ("ao_int8", "scale_and_zero", torch.ones(64), "_weight_scale_and_zero is no part of a weight of integers"),
        ("ao_fp8", "qdata", torch.zeros(64, 64).to(torch.int8), "_weight_qdata has type int8; allowed: float8_e4m3fn"),
        ("ao_int4", "zero_point", None, "q_proj._weight_zero_point is missing"),
        ("ao_int4", "zero_point", torch.full((2, 64), NAN), "_weight_zero_point holds .* no finite numbers"),
        ("ao_int4", "zero_point", torch.ones(64, 2), r"_weight_zero_point has shape \(64, 2\); allowed: \(2, 64\)"),
        ("ao_int4", "scale", torch.full((2, 64), torch.inf), "_weight_scale holds scales that are no finite numbers"),
        ("ao_int4", "qdata", torch.zeros(64, 64).to(torch.int8), r"has shape \(64, 64\); allowed: that of a weight"),
        ("ao_tiles", "scale_and_zero", None, "q_proj._weight_scale_and_zero is missing"),
        ("ao_tiles", "scale_and_zero", torch.ones(32, 64), r"has shape \(32, 64\); allowed: \(32, 64, 2\)"),
        ("ao_tiles", "scale_and_zero", torch.full((32, 64, 2), NAN), "scale_and_zero holds .* no finite numbers"),
        (
            "ao_tiles",
            "qdata",
            torch.zeros(64, 32).int(),
            r"has shape \(64, 32\); allowed: tiles of a weight \(64, 64\)",
        ),
        (
            "ao_tiles",
            "qdata",
            torch.zeros(8, 8, 64, 2).int(),
            r"\(8, 8, 64, 2\); allowed: tiles of a weight \(64, 64\)",
        ),
        (
            "ao_tiles",
            "qdata",
            torch.zeros(9, 8, 32, 4).int(),
            r"\(9, 8, 32, 4\); allowed: tiles of a weight \(64, 64\)",
        ),
        (
            "ao_tiles",
            "qdata",
            torch.zeros(8, 0, 32, 4).int(),
            r"\(8, 0, 32, 4\); allowed: tiles of a weight \(64, 64\)",
        ),
        ("ao_tiles", "qdata", torch.zeros(8).int(), r"has shape \(8,\); allowed: tiles of a weight \(64, 64\)"),
    ],
)
def test_tensors(packed: Callable[[str], Path], kind: str, part: str, value: Tensor | None, sentence: str) -> None:
    folder = packed(kind)
    rewrite(folder, {f"{Q}._weight_{part}": value}, {})
    with pytest.raises(ConfigError, match=sentence):
        load(folder)


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        (
            "ao_int8",
            {"_type": "Int4PreshuffledTensor"},
            "_type is 'Int4PreshuffledTensor'; allowed: Tensor, Int4Tensor",
        ),
        ("ao_int8", {"_type": "NVFP4Tensor"}, "metadata of .*q_proj.weight: _type is 'NVFP4Tensor'.*quantise the orig"),
        ("ao_int8", {"_type": ["Int8Tensor"]}, "_type is .*; allowed: Tensor, Int4Tensor"),
        (
            "ao_int8",
            {"_type": "Tensor"},
            "q_proj._weight_.* is quantised, but the metadata of the files does not say how",
        ),
        ("ao_int8", {"_data": None}, r"_weight_scale has shape \(64, 1\); allowed: \(1, 1\)"),
        ("ao_int8", {"_data": 3}, "_data is 3; allowed: a mapping"),
        ("ao_int8", {"_data": {"block_size": [1]}}, r"block_size is \[1\]; allowed: two positive integers"),
        ("ao_int8", {"_data": {"block_size": [0, 64]}}, r"block_size is \[0, 64\]; allowed: two positive integers"),
        ("ao_int8", {"_data": {"block_size": [1, True]}}, r"block_size is \[1, True\]; allowed: two positive integers"),
        ("ao_int8", {"_data": {"block_size": [1, 16]}}, r"_weight_scale has shape \(64, 1\); allowed: \(64, 4\)"),
        ("ao_int8", {"_tensor_data_names": ["other"]}, "q_proj._weight_other is missing"),
        (
            "ao_int8",
            {"_tensor_data_names": [[]], "_type": "Int4Tensor"},
            "is of a weight of shape None; allowed: a matrix",
        ),
        ("ao_intx_4", {"_data": {"block_size": [1, 32]}}, "target_dtype is None; allowed: one of int1"),
        ("ao_int4", {"_data": {"shape": [64], "block_size": [1, 32]}}, r"a weight of shape \[64\]; allowed: a matrix"),
        (
            "ao_int4",
            {"_data": {"shape": [64, 64], "block_size": [2, 32]}},
            r"block_size is \[2, 32\]; allowed: one row",
        ),
        (
            "ao_int4",
            {"_data": {"shape": [64, 64], "block_size": [1, 10**30]}},
            "block_size is .*; allowed: one row, and 1 to 65536 columns",
        ),
        ("ao_int8", {"_data": {"block_size": [10**30] * 2}}, r"_weight_scale has shape \(64, 1\); allowed: \(1, 1\)"),
        ("ao_int4", {"_data": {"shape": [64, 64], "block_size": []}}, r"block_size is \[\]; allowed: two positive"),
        (
            "ao_tiles",
            {"_data": {"shape": [64, 2048], "block_size": [1, 32]}},
            r"tiles of a weight \(64, 2048\) in groups",
        ),
        (
            "ao_tiles",
            {"_data": {"shape": [64, 64], "block_size": [1, 48]}},
            r"tiles of a weight \(64, 64\) in groups of 48",
        ),
        ("ao_tiles", {"_data": {"shape": [72, 64], "block_size": [1, 32]}}, r"tiles of a weight \(72, 64\) in groups"),
        (
            "ao_tiles",
            {"_data": {"shape": [60, 64], "block_size": [1, 32]}},
            r"of another shape: .*q_proj.weight \(60, 64",
        ),
    ],
)
def test_metadata_of_a_weight(
    packed: Callable[[str], Path], kind: str, change: dict[str, object], sentence: str
) -> None:
    folder, name = packed(kind), f"{Q}.weight"
    rewrite(folder, {}, {name: json.dumps(json.loads(metadata_of(folder / FILE)[name]) | change)})
    with pytest.raises(ConfigError, match=sentence):
        load(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"tensor_names": None},
            "has no metadata of TorchAO's tensors .tensor_names.*; allowed: files as transformers",
        ),
        ({"tensor_names": "[]"}, "has no metadata of TorchAO's tensors"),
        ({"tensor_names": "{}"}, "metadata tensor_names is '{}'; allowed: a list of tensors' names"),
        ({"tensor_names": "[" * 100_000}, "metadata tensor_names is .*; allowed: a list of tensors' names"),
        ({"tensor_names": "[3]"}, "allowed: a list of tensors' names"),
        ({f"{Q}.weight": None}, "metadata of .*q_proj.weight is None; allowed: a JSON object"),
        ({f"{Q}.weight": "[]"}, r"metadata of .*q_proj.weight is '\[\]'; allowed: a JSON object"),
        ({f"{Q}.weight": "{"}, "metadata of .*q_proj.weight is '{'; allowed: a JSON object"),
    ],
)
def test_metadata(packed: Callable[[str], Path], change: dict[str, str | None], sentence: str) -> None:
    folder = packed("ao_int8")
    rewrite(folder, {}, change)
    with pytest.raises(ConfigError, match=sentence):
        load(folder)


def test_a_tensor_of_all_experts(packed: Callable[[str], Path]) -> None:
    folder, name = packed("ao_fp8"), "model.layers.0.mlp.experts.gate_up_proj"
    names = json.loads(metadata_of(folder / FILE)["tensor_names"])
    more = {name: json.dumps({"_type": "Float8Tensor"}), "tensor_names": json.dumps([*names, name])}
    rewrite(folder, {}, more)
    with pytest.raises(ConfigError, match="gate_up_proj is stored as 'Float8Tensor'; allowed: Tensor, as it is no mod"):
        load(folder)


def test_a_header_whose_metadata_are_no_texts(packed: Callable[[str], Path]) -> None:
    folder = packed("ao_int8")
    data = (folder / FILE).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = {"tensor_names": ["x"]}
    text = json.dumps(header).encode().ljust(size)
    (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ConfigError, match="the header's __metadata__ is damaged"):
        load(folder)


def test_pickles_are_refused(packed: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((packed("ao_int8") / "config.json").read_text())
    torch.save({"x": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ConfigError, match="pytorch_model.bin: its tensors are objects of TorchAO's classes, .*; load the model"
    ):
        load(tmp_path)
