"""Each layout of a quantised weight: from its parts to what decodes it. Only bitsandbytes' few bytes about a weight are
read here, nothing of its values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch

from raylm.errors import ConfigError
from raylm.models.checkpoint import CheckpointTensor
from raylm.models.fields import Fields
from raylm.models.quantised.bnb import NestedScales, Rows
from raylm.models.quantised.codes import (
    TILE_COLUMNS,
    TILE_ROWS,
    TILE_WORDS,
    AWQColumns,
    Codes,
    Nibbles,
    PackedColumns,
    PackedRows,
    SignedNibbles,
    TableNibbles,
    Tiles,
    Values,
)
from raylm.models.quantised.grid import (
    Constant,
    Factor,
    Grid,
    LessOneZeros,
    PackedZeros,
    Paired,
    PlainZeros,
    Scales,
    Shifts,
)
from raylm.models.quantised.joined import Decoder, Grouped, Groups
from raylm.models.quantised.matrix import read, shaped, words_of
from raylm.models.quantised.parts import FLOATS, Parts

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_WORDS = (torch.int32,)
_BYTES = (torch.uint8,)
_TILE = (32, 4)
"""Lanes and words of a tile."""
_NUM_BNB_CODES = 16
_MAX_BNB_STATE_BYTES = 1 << 16
_MOST_ELEMENTS = 1 << 40
Joined = tuple[Decoder, CheckpointTensor]
"""What decodes a weight, and the part with its codes."""


def _values(parts: Parts) -> Joined:
    """A code of 8 bits an element."""
    scheme = parts.scheme
    weight = parts.matrix(parts.take("weight", types=FLOAT8 if scheme.numbers == "float" else (torch.int8,)))
    codes = Values(weight)
    scales = _scales(parts, codes.shape, "weight_scale", "weight_scale_inv")
    zeros = None
    if scheme.zero == "stored":
        zero_points = parts.take("weight_zero_point", types=(torch.int8, torch.int32, *FLOATS))
        zeros = PlainZeros(parts.grid(zero_points, _grid_shape(parts, codes.shape)))
    else:
        parts.ignore("weight_zero_point")
    return _grouped(parts, codes, scales, zeros, "weight_g_idx"), weight


def _nibbles(parts: Parts) -> Joined:
    """Floats of 4 bits, two a byte."""
    weight = parts.matrix(parts.take("weight_packed", "weight", types=_BYTES))
    codes = Nibbles(weight)
    return _grouped(parts, codes, _scales(parts, codes.shape, "weight_scale"), None, ""), weight


def _packed(parts: Parts) -> Joined:
    """compressed-tensors' integers in int32, without a sign: the middle is added to each."""
    scheme = parts.scheme
    weight = parts.matrix(parts.take("weight_packed", types=_WORDS))
    shape = _stored_shape(parts, weight)
    words = words_of((0, shape[1]), scheme.bits)[1]
    if (shape[0], words) != weight.shape:
        raise parts.error(weight, f"has shape {weight.shape}", f"{(shape[0], words)}, as the weight is {shape}")
    codes = PackedRows(weight, scheme.bits, shape[1])
    scales = _scales(parts, shape, "weight_scale", signed=True)
    middle = 1 << scheme.bits - 1
    zeros: Grid = Constant(middle)
    if scheme.zero == "stored":
        stored = parts.take("weight_zero_point", types=(torch.int32, torch.int8))
        rows, columns = _grid_shape(parts, shape)
        if stored.encoding.dtype == torch.int8:
            zeros = PlainZeros(parts.grid(stored, (rows, columns)), offset=middle)
        else:
            packed = parts.grid(stored, (words_of((0, rows), scheme.bits)[1], columns))
            zeros = PackedZeros(PackedColumns(packed, scheme.bits, rows), transposed=True)
    else:
        parts.ignore("weight_zero_point")
    return _grouped(parts, codes, scales, zeros, "weight_g_idx"), weight


def _gptq(parts: Parts) -> Joined:
    """Integers of a column of the transposed weight in int32."""
    scheme = parts.scheme
    weight = parts.matrix(parts.take("qweight", types=_WORDS))
    words, rows = weight.shape
    if words * 32 % scheme.bits:
        raise parts.error(weight, f"has {words} rows", f"a multiple of {scheme.bits}, which {scheme.bits} bits fill")
    codes = PackedColumns(weight, scheme.bits, words * 32 // scheme.bits)
    zeros: Grid = Constant(1 << scheme.bits - 1)
    if scheme.zero == "middle":
        parts.ignore("qzeros")
    else:
        groups = _grid_shape(parts, codes.shape)[1]
        stored = parts.take("qzeros", types=_WORDS)
        stored = parts.grid(stored, (groups, words_of((0, rows), scheme.bits)[1]))
        if scheme.zero == "stored_less_1":
            zeros = LessOneZeros(stored, scheme.bits)
        else:
            zeros = PackedZeros(PackedRows(stored, scheme.bits, rows), transposed=True)
    return _grouped(parts, codes, _transposed_scales(parts, codes.shape), zeros, "g_idx"), weight


def _awq(parts: Parts) -> Joined:
    """Integers of a row of the transposed weight in int32, eight in AWQ's order."""
    weight = parts.matrix(parts.take("qweight", types=_WORDS))
    codes = AWQColumns(weight)
    zeros: Grid = Constant(1 << parts.scheme.bits - 1)
    if parts.scheme.zero == "middle":
        parts.ignore("qzeros")
    else:
        groups = _grid_shape(parts, codes.shape)[1]
        stored = parts.take("qzeros", types=_WORDS)
        zeros = PackedZeros(AWQColumns(parts.grid(stored, (groups, weight.shape[1]))))
    return _grouped(parts, codes, _transposed_scales(parts, codes.shape), zeros, "g_idx"), weight


def _bnb8(parts: Parts) -> Joined:
    """bitsandbytes' integers of 8 bits: 127 stands for the largest of a row."""
    weight = parts.matrix(parts.take("weight", types=(torch.int8,)))
    order = parts.maybe("weight_format", types=_BYTES)
    if order is not None and int(read(parts.grid(order, (1, 1)), (0, 1), (0, 1))) != 0:
        raise parts.error(order, "names an order of elements for one kind of GPU", "0 (row by row)")
    codes = Values(weight)
    largest = parts.grid(parts.take("SCB", types=FLOATS), (codes.shape[0], 1))
    return _grouped(parts, codes, Scales(largest, factor=1 / 127), None, ""), weight


def _bnb4(parts: Parts) -> Joined:
    """bitsandbytes' NF4 and FP4: the values of the 16 codes and the weight's shape are in the file."""
    weight = parts.bytes(parts.take("weight", types=(*_BYTES, *FLOATS)))
    state = _bnb_state(parts)
    shape = _bnb_shape(state)
    block = state.integer("blocksize")
    parts.scheme = replace(parts.scheme, columns=block)
    if weight.num_bytes != -(-prod(shape) // 2):
        raise parts.error(weight, f"has {weight.num_bytes} bytes", f"{-(-prod(shape) // 2)}, as the weight is {shape}")
    # Where blocks end with rows, columns are read alone.
    ends = shape[1] % block == 0 and shape[1] % 2 == 0
    view = shape if ends else (1, prod(shape) + prod(shape) % 2)
    codes = TableNibbles(shaped(weight, (view[0], view[1] // 2)), _bnb_table(parts, "weight.quant_map", _NUM_BNB_CODES))
    scales = _bnb_scales(parts, state, (view[0], -(-prod(shape) // block // view[0])))
    decoder = Grouped(codes=codes, scales=scales, zeros=None, rows=1, columns=block)
    return decoder if ends else Rows(decoder, shape), weight


def _signed_nibbles(parts: Parts) -> Joined:
    """TorchAO's integers of 4 bits (Int4Tensor)."""
    weight = parts.matrix(parts.take("weight", types=(torch.int8, torch.uint8)))
    codes = SignedNibbles(weight)
    if codes.shape != parts.shape:
        raise parts.error(weight, f"has shape {weight.shape}", f"that of a weight {parts.shape}, two integers a byte")
    rows, groups = _grid_shape(parts, codes.shape)
    scales, shifts = (
        parts.grid(parts.take(name, types=FLOATS), (groups, rows)) for name in ("weight_scale", "weight_zero_point")
    )
    return _shifted(parts, codes, Scales(scales, transposed=True, signed=True), Shifts(shifts)), weight


def _tiles(parts: Parts) -> Joined:
    """The same for tinygemm's kernels (Int4TilePackedTo4dTensor)."""
    weight = parts.take("weight", types=_WORDS)
    shape, columns = parts.shape, parts.scheme.columns
    assert shape is not None
    down, across, *rest = (*weight.shape, 0, 0)
    is_whole = tuple(rest) == (*_TILE, 0, 0) and down == -(-shape[0] // TILE_ROWS)
    filled = across * TILE_COLUMNS
    if not is_whole or filled < shape[1] or filled % columns:
        raise parts.error(weight, f"has shape {weight.shape}", f"tiles of a weight {shape} in groups of {columns}")
    codes = Tiles(shaped(weight, (down, across * TILE_WORDS)), shape)
    stored = parts.take("weight_scale_and_zero", types=FLOATS)
    expected = filled // columns, down * TILE_ROWS, 2
    if stored.shape != expected:
        raise parts.error(
            stored, f"has shape {stored.shape}", f"{expected}: a scale and a shift for each group and row"
        )
    pairs = shaped(stored, (expected[0], 2 * expected[1]))
    return _shifted(parts, codes, Paired(pairs, 0), Paired(pairs, 1)), weight


LAYOUTS: dict[str, Callable[[Parts], Joined]] = {
    "values": _values,
    "nibbles": _nibbles,
    "packed": _packed,
    "gptq": _gptq,
    "awq": _awq,
    "bnb8": _bnb8,
    "nf4": _bnb4,
    "fp4": _bnb4,
    "signed_nibbles": _signed_nibbles,
    "tiles": _tiles,
}
"""Scheme.layout -> what joins it. Each raises ConfigError where parts are missing or do not fit together."""


def _grouped(parts: Parts, codes: Codes, scales: Grid, zeros: Grid | None, index: str) -> Grouped:
    """`index` is the name of the part that says which group a column is of."""
    scheme, groups = parts.scheme, None
    if scheme.ordered and scheme.columns:
        column_groups = parts.grid(parts.take(index, types=_WORDS), (codes.shape[1], 1))
        groups = Groups(column_groups, _grid_shape(parts, codes.shape)[1])
    else:
        parts.ignore(index)
    return Grouped(codes=codes, scales=scales, zeros=zeros, rows=scheme.rows, columns=scheme.columns, groups=groups)


def _shifted(parts: Parts, codes: Codes, scales: Grid, shifts: Grid) -> Grouped:
    """Of integers of 4 bits, whose middle is the zero point."""
    middle = Constant(1 << parts.scheme.bits - 1)
    columns = parts.scheme.columns
    return Grouped(codes=codes, scales=scales, zeros=middle, rows=1, columns=columns, shifts=shifts)


def _grid_shape(parts: Parts, shape: tuple[int, int]) -> tuple[int, int]:
    """Blocks that share a scale, down and across."""
    rows, columns = parts.scheme.rows, parts.scheme.columns
    return -(-shape[0] // rows) if rows else 1, -(-shape[1] // columns) if columns else 1


def _scales(parts: Parts, shape: tuple[int, int], *names: str, signed: bool = False) -> Scales:
    scheme = parts.scheme
    types = _EXPONENTS if scheme.exponents else (*FLOATS, torch.float8_e8m0fnu)
    if scheme.two_scales:
        types = (torch.float8_e4m3fn,)
    scales = parts.grid(parts.take(*names, types=types), _grid_shape(parts, shape))
    return Scales(scales, signed=signed, whole=_whole(parts) if scheme.two_scales else None)


def _whole(parts: Parts) -> Factor:
    """NVFP4's scale of the whole weight: compressed-tensors divides by it, ModelOpt multiplies."""
    found = parts.take("weight_global_scale", "weight_scale_2", types=FLOATS)
    return Factor(parts.grid(found, (1, 1)), divides=found.name.endswith("weight_global_scale"))


def _transposed_scales(parts: Parts, shape: tuple[int, int]) -> Scales:
    rows, groups = _grid_shape(parts, shape)
    return Scales(parts.grid(parts.take("scales", types=FLOATS), (groups, rows)), transposed=True, signed=True)


def _stored_shape(parts: Parts, weight: CheckpointTensor) -> tuple[int, int]:
    """weight_shape's two numbers, which tell how many integers the last word of a row holds."""
    stored = parts.take("weight_shape", types=(torch.int64, torch.int32))
    rows, columns = read(parts.grid(stored, (1, 2)), (0, 1), (0, 2)).flatten().tolist()
    if rows < 1 or columns < 1 or rows * columns > _MOST_ELEMENTS:
        raise parts.error(stored, f"is {[rows, columns]}", "two positive integers, the weight's shape")
    return rows, columns


def _bnb_state(parts: Parts) -> Fields:
    stored = parts.take(*(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")), types=_BYTES)
    if stored.num_bytes > _MAX_BNB_STATE_BYTES:
        raise parts.error(stored, f"has {stored.num_bytes} bytes", f"at most {_MAX_BNB_STATE_BYTES}")
    data = read(shaped(stored, (1, stored.num_values)), (0, 1), (0, stored.num_values))
    try:
        values = json.loads(data.numpy().tobytes())
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise parts.error(stored, "is no JSON object", "what bitsandbytes says of the weight")
    return Fields(values, f"{stored.path}: {stored.name}")


def _bnb_shape(state: Fields) -> tuple[int, int]:
    shape = state.get("shape")
    is_pair = isinstance(shape, list) and len(shape) == 2
    if not is_pair or any(type(size) is not int or size < 1 for size in shape) or prod(shape) > _MOST_ELEMENTS:
        raise state.error("shape", shape, "two positive integers")
    return shape[0], shape[1]


def _bnb_table(parts: Parts, name: str, size: int) -> torch.Tensor:
    """The values of all codes."""
    stored = parts.grid(parts.take(name, types=FLOATS), (1, size))
    table = read(stored, (0, 1), (0, size)).float()[0]
    if not bool(table.isfinite().all()):
        raise ConfigError(f"{stored.path}: tensor {stored.name} holds values that are no finite numbers")
    return table


def _bnb_scales(parts: Parts, state: Fields, shape: tuple[int, int]) -> Grid:
    largest = parts.take("weight.absmax", types=(*_BYTES, *FLOATS))
    if largest.num_values != prod(shape):
        raise parts.error(largest, f"has {largest.num_values} numbers", str(prod(shape)))
    largest = shaped(largest, shape)
    if largest.encoding.dtype != torch.uint8:
        return Scales(largest)
    block, offset = state.integer("nested_blocksize"), state.get("nested_offset")
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not 0 <= offset <= 1e30:
        raise state.error("nested_offset", offset, "a number of 0 or above")
    nested = parts.take("weight.nested_absmax", types=FLOATS)
    return NestedScales(
        codes=largest,
        largest=parts.grid(nested, (1, -(-prod(shape) // block))),
        table=_bnb_table(parts, "weight.nested_quant_map", 256),
        block=block,
        offset=float(offset),
    )
