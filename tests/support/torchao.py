"""Small random checkpoints of TorchAO, as torchao 0.15 to 0.18 and transformers flatten them into safetensors.

The configurations and the metadata are those that these programs wrote of a small Llama.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.quantised import (
    FILE,
    Kind,
    Packed,
    blocks,
    decoded,
    fp8_codes,
    grid_shape,
    integers,
    pack_rows,
    scales,
)

BFLOAT16 = {"_type": "torch.dtype", "_data": "bfloat16"}
ROWS = {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}}
INT8_ACTIVATIONS = {"_type": "QuantizeTensorToInt8Kwargs", "_data": ROWS | {"reduce_range": False}}
FP8_ACTIVATIONS = {"_type": "QuantizeTensorToFloat8Kwargs", "_data": ROWS | {"mm_config": None}}
PER_ROW = {"_type": "PerRow", "_data": {"dim": -1}, "_version": 1}
PER_TENSOR = {"_type": "PerTensor", "_data": {}, "_version": 1}


def per_group(columns: int) -> dict[str, object]:
    return {"_type": "PerGroup", "_data": {"group_size": columns}, "_version": 1}


def config(kind: str, *, version: int = 2, **data: object) -> dict[str, object]:
    """quantization_config."""
    return of_type({"_type": kind, "_data": data, "_version": version})


def of_type(default: object) -> dict[str, object]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": default},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def by_name(modules: dict[str, object]) -> dict[str, object]:
    """A mapping of modules, as transformers writes it."""
    return of_type({"_type": "FqnToConfig", "_data": {"fqn_to_config": modules, "module_fqn_to_config": modules}})


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def rewrite(folder: Path, tensors: dict[str, Tensor | None], metadata: dict[str, str | None]) -> None:
    """With these in place of the file's; None: without it."""
    stored, told = load_file(folder / FILE) | tensors, metadata_of(folder / FILE) | metadata
    save_file(
        {name: tensor for name, tensor in stored.items() if tensor is not None},
        folder / FILE,
        {name: text for name, text in told.items() if text is not None},
    )


Told = Callable[[int, int], dict[str, object]]
"""A weight's shape -> what the metadata says of it, but for the names of its tensors."""


def told(kind: str, rows: int = 1, columns: int = 0, *, shaped: bool = False, **data: object) -> Told:
    """0 stands for all rows or columns."""

    def of(n: int, k: int) -> dict[str, object]:
        own: dict[str, object] = {"block_size": [rows or n, columns or k]}
        return {"_type": kind, "_data": own | ({"shape": [n, k]} if shaped else {"dtype": BFLOAT16}) | data}

    return of


@dataclass(frozen=True, slots=True)
class Metadata:
    """Of a file whose quantised weights are all stored alike."""

    told: Told

    def __call__(self, shapes: Mapping[str, tuple[int, int]], stored: Mapping[str, Tensor]) -> dict[str, str]:
        """`shapes`: those of the quantised weights by their modules."""
        return written({module: (self.told, shape) for module, shape in shapes.items()}, stored)


def written(modules: Mapping[str, tuple[Told, tuple[int, int]]], stored: Mapping[str, Tensor]) -> dict[str, str]:
    found: dict[str, object] = {}
    for module, (of, shape) in modules.items():
        begin = f"{module}._weight_"
        names = [name.removeprefix(begin) for name in stored if name.startswith(begin)]
        found[f"{module}.weight"] = of(*shape) | {"_tensor_data_names": names}
    found |= {name: {"_type": "Tensor"} for name in stored if "._weight_" not in name}
    texts = {name: json.dumps(value) for name, value in found.items()}
    return texts | {"tensor_names": json.dumps(list(found)), "format": "pt"}


def values(
    bits: int, rows: int, columns: int, *, zeros: str = "symmetric", dtype: torch.dtype = torch.float32, extra: str = ""
) -> Callable[[torch.Generator, int, int], Packed]:
    """Int8Tensor and IntxUnpackedToInt8Tensor. `zeros`: symmetric (all are 0), any, or none in the file."""

    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        middle, size = 1 << bits - 1, grid_shape(n, k, rows, columns)
        codes = integers(random, -middle, middle, n, k).to(torch.int8)
        scale = scales(random, *size, size=0.25 / middle)
        zero = integers(random, -middle, middle, *size) if zeros == "any" else torch.zeros(size, dtype=torch.long)
        parts = {"_weight_qdata": codes, "_weight_scale": scale.to(dtype)}
        if zeros != "none":
            parts["_weight_zero_point"] = zero.to(torch.int8)
        if extra:
            parts[extra] = torch.ones(1, 1)
        return parts, decoded(codes, zero, scale, blocks(rows, columns))

    return pack


def fp8(rows: int, columns: int) -> Callable[[torch.Generator, int, int], Packed]:
    """Float8Tensor."""

    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        codes, scale = fp8_codes(random, n, k), scales(random, *grid_shape(n, k, rows, columns), size=0.15)
        parts = {"_weight_qdata": codes, "_weight_scale": scale}
        return parts, decoded(codes.float(), 0, scale, blocks(rows, columns))

    return pack


def _int4(random: torch.Generator, n: int, k: int, columns: int, *, shifted: bool) -> tuple[Tensor, ...]:
    """Codes with a sign, scales, what is added, and the values."""
    codes, size = integers(random, -8, 8, n, k), grid_shape(n, k, 1, columns)
    scale = scales(random, *size, size=0.03)
    added = (0.1 * torch.randn(size, generator=random)).bfloat16().float() * shifted
    dense = decoded(codes, 0, scale, blocks(1, columns)) + added.repeat_interleave(columns, 1)[:, :k]
    return codes, scale, added, dense


def int4(columns: int, *, shifted: bool = True) -> Callable[[torch.Generator, int, int], Packed]:
    """Int4Tensor: of two codes the first is in the lower bits."""

    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        codes, scale, added, dense = _int4(random, n, k, columns, shifted=shifted)
        parts = {
            "_weight_qdata": pack_rows(codes % 16, 4).view(torch.int8),
            "_weight_scale": scale.t().contiguous().bfloat16(),
            "_weight_zero_point": added.t().contiguous().bfloat16(),
        }
        return parts, dense

    return pack


def tile_words(codes: Tensor) -> Tensor:
    """Codes 0 to 15 [N, K], N a multiple of 8 and K of 128, as `_convert_weight_to_int4pack(_, 8)` has them on NVIDIA's
    GPUs: int32 [N / 8, K / 128, 32, 4]. A lane takes of a matrix of 16 columns, the factor of a tensor core's product,
    two neighbours and the two that are 8 columns behind them; a word holds those of two such matrices."""
    places = []
    for lane in range(32):
        row, first = lane // 4, lane % 4 * 2
        for pair in range(0, 128, 32):
            v = [first + pair + tile + at + odd for tile in (0, 16) for at in (0, 8) for odd in (0, 1)]
            order = (v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7])
            places.append([128 * row + column for column in order])
    of_tiles = codes.unflatten(0, (-1, 8)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    return pack_rows(of_tiles[:, :, places].flatten(0, 2), 4).view(*of_tiles.shape[:2], 32, 4)


def tiles(columns: int) -> Callable[[torch.Generator, int, int], Packed]:
    """Int4TilePackedTo4dTensor: filled up to whole tiles and to 1,024 columns."""

    def pack(random: torch.Generator, n: int, k: int) -> Packed:
        codes, scale, added, dense = _int4(random, n, k, columns, shifted=True)
        rows, width = -(-n // 8) * 8, -(-k // 1024) * 1024
        filled = integers(random, 0, 16, rows, width)
        filled[:n, :k] = codes + 8
        pairs = torch.full((width // columns, rows, 2), torch.pi)
        pairs[: scale.shape[1], :n] = torch.stack((scale, added), dim=-1).transpose(0, 1)
        return {"_weight_qdata": tile_words(filled), "_weight_scale_and_zero": pairs.bfloat16()}, dense

    return pack


def _kind(configuration: dict[str, object], packer: Callable[[torch.Generator, int, int], Packed], of: Told) -> Kind:
    return Kind(configuration, packer, metadata=Metadata(of))


_INT4 = {"set_inductor_config": True, "int4_tile_packed_ntile": 8}
_INTX = {"intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"}}
_PLAIN = {"_type": "Int4PackingFormat", "_data": "PLAIN"}
_HALF = torch.bfloat16


def _intx(bits: int, columns: int, **how: str) -> Kind:
    dtype = {"_type": "torch.dtype", "_data": f"int{bits}"}
    return _kind(
        config("IntxWeightOnlyConfig", **_INTX, weight_dtype=dtype, granularity=per_group(columns)),
        values(bits, 1, columns, dtype=_HALF, **how),
        told("IntxUnpackedToInt8Tensor", 1, columns, target_dtype=dtype, activation_quantization=None),
    )


_ASYMMETRIC = {"_type": "MappingType", "_data": "ASYMMETRIC"}


def _asymmetric(activations: dict[str, object]) -> dict[str, object]:
    return {**activations, "_data": {**activations["_data"], "mapping_type": _ASYMMETRIC}}


KINDS: dict[str, Kind] = {
    "ao_int8": _kind(config("Int8WeightOnlyConfig", granularity=PER_ROW), values(8, 1, 0), told("Int8Tensor")),
    "ao_int8_groups": _kind(
        config("Int8WeightOnlyConfig", granularity=per_group(32)), values(8, 1, 32), told("Int8Tensor", 1, 32)
    ),
    "ao_int8_tensor": _kind(
        config("Int8WeightOnlyConfig", granularity=PER_TENSOR), values(8, 0, 0), told("Int8Tensor", 0, 0)
    ),
    "ao_int8_columns": _kind(
        config("Int8WeightOnlyConfig", granularity={"_type": "PerRow", "_data": {"dim": 0}}),
        values(8, 0, 1),
        told("Int8Tensor", 0, 1),
    ),
    "ao_int8_dynamic": _kind(
        config("Int8DynamicActivationInt8WeightConfig", granularity=PER_ROW),
        values(8, 1, 0, zeros="none"),  # as torchao 0.16 has it
        told("Int8Tensor", act_quant_kwargs=INT8_ACTIVATIONS),
    ),
    "ao_int8_asymmetric": _kind(
        config("Int8DynamicActivationInt8WeightConfig", granularity=PER_ROW, act_mapping_type=_ASYMMETRIC),
        values(8, 1, 0, zeros="none"),
        told("Int8Tensor", act_quant_kwargs=_asymmetric(INT8_ACTIVATIONS)),
    ),
    "ao_int8_static": _kind(
        config("Int8StaticActivationInt8WeightConfig", granularity=[PER_TENSOR, PER_ROW]),
        values(8, 1, 0, extra="_weight_act_quant_scale"),
        told("Int8Tensor", act_quant_kwargs=INT8_ACTIVATIONS),
    ),
    "ao_int4": _kind(
        config("Int4WeightOnlyConfig", **_INT4, group_size=32, int4_packing_format=_PLAIN),
        int4(32),
        told("Int4Tensor", 1, 32, shaped=True),
    ),
    "ao_int4_64": _kind(
        config("Int4WeightOnlyConfig", **_INT4, group_size=64, int4_packing_format="plain"),
        int4(64),
        told("Int4Tensor", 1, 64, shaped=True),
    ),
    "ao_int4_fp8": _kind(
        config("Float8DynamicActivationInt4WeightConfig", version=1, int4_packing_format="plain"),
        int4(32, shifted=False),
        told("Int4Tensor", 1, 32, shaped=True, activation_dtype={"_type": "torch.dtype", "_data": "float8_e4m3fn"}),
    ),
    "ao_tiles": _kind(
        config("Int4WeightOnlyConfig", **_INT4, group_size=32, int4_packing_format="tile_packed_to_4d"),
        tiles(32),
        told("Int4TilePackedTo4dTensor", 1, 32, shaped=True),
    ),
    "ao_tiles_128": _kind(
        config("Int4WeightOnlyConfig", **_INT4, group_size=128, int4_packing_format="tile_packed_to_4d"),
        tiles(128),
        told("Int4TilePackedTo4dTensor", 1, 128, shaped=True),
    ),
    "ao_fp8": _kind(
        config("Float8WeightOnlyConfig", granularity=PER_ROW), fp8(1, 0), told("Float8Tensor", act_quant_kwargs=None)
    ),
    "ao_fp8_dynamic": _kind(
        config("Float8DynamicActivationFloat8WeightConfig", granularity=[PER_ROW, PER_ROW]),
        fp8(1, 0),
        told("Float8Tensor", act_quant_kwargs=FP8_ACTIVATIONS),
    ),
    "ao_fp8_tensor": _kind(
        config("Float8DynamicActivationFloat8WeightConfig", granularity=[PER_TENSOR, PER_TENSOR]),
        fp8(0, 0),
        told("Float8Tensor", 0, 0, act_quant_kwargs=FP8_ACTIVATIONS),
    ),
    "ao_fp8_blocks": _kind(
        config(
            "Float8DynamicActivationFloat8WeightConfig",
            granularity=[{"_type": "PerBlock", "_data": {"block_size": [1, 32]}}] * 2,
        ),
        fp8(32, 32),
        told("Float8Tensor", 32, 32, act_quant_kwargs=FP8_ACTIVATIONS),
    ),
    "ao_intx_3": _intx(3, 32),
    "ao_intx_4": _intx(4, 32),
    "ao_intx_4_zeros": _intx(4, 32, zeros="any"),
    "ao_intx_8_zeros": _intx(8, 32, zeros="any"),
}
"""Name of a test's case -> how it is stored."""
