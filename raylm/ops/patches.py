"""Weights as codes in patches of 16 rows and 128 columns, as patched_linear and patched_experts take them, and these
operators in terms of torch's own.

A patch is codes and then words of scales. Of "int4" and "int8" these are a word for each group of columns and row, the
bits of a float32 scale whose lowest 8 bits are the zero point; of "affine4" and "affine8" two float16, the scale and
the offset; of "nf4" a float32 scale; of "fp8" (e4m3) a float32 for each row; of "mxfp4" (e2m1) and "mxfp8" (e4m3) the
exponents of four powers of two (e8m0) for each row, one for each 32 columns. "int8_rows" are "int8" with one scale for
all columns of a row and the zero point 128, and "fp8_rows" are "fp8": products multiply both by activations that are
rounded to such integers or floats.

Rows are numbered 8 h + g. Codes of 4 bits, of columns numbered 32 i + 8 p + 2 t + e, lie in the order of (h, g, t, i,
e, p), two a byte, the first of them in the lower bits; those of "nf4" in the order of (h, g, t, i, p, e). Those of 8
bits, of columns numbered 64 s + 16 k + 8 p + 2 t + e, lie in the order of (s, h, g, t, k, e, 1 - p). So g and t say
which of a warp's lanes takes 16 bytes of them. Those of integers have 128 taken from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.ops import experts
from raylm.ops.scaled_fallback import CODES, row_scales, scale_rows

Numbers = Literal["int4", "int8", "mxfp4", "fp8", "affine4", "affine8", "nf4", "mxfp8", "int8_rows", "fp8_rows"]
NUMBERS: tuple[Numbers, ...] = get_args(Numbers)
"""Operators take the place in this list."""
PATCH_ROWS, PATCH_COLUMNS = 16, 128
GROUPS: dict[Numbers, tuple[int, ...]] = {
    "int4": (32, 64, 128),
    "int8": (16, 32, 64, 128),
    "mxfp4": (32,),
    "fp8": (PATCH_COLUMNS,),
    "affine4": (16, 32),
    "affine8": (32,),
    "nf4": (32, 64, 128),
    "mxfp8": (32,),
    "int8_rows": (PATCH_COLUMNS,),
    "fp8_rows": (PATCH_COLUMNS,),
}
"""Columns that may share a scale."""
MOST_ZERO: dict[Numbers, int] = {"int4": 127, "int8": 255, "int8_rows": 128}
"""The largest zero point of integers: float16 and bfloat16 hold what is left of it and a code."""
MOST_CODE: dict[Numbers, int] = {"int4": 15, "int8": 255, "affine4": 15, "affine8": 127, "int8_rows": 255}
MOST_UNROUNDED: dict[Numbers, int] = {"int8_rows": 16, "fp8_rows": 64}
"""Up to so many rows a product does not round its activations: reading the weight bounds it."""
MOST_EXPONENT = 191
"""Of the scales of MXFP4 and MXFP8: those of 2 ** 64 kernels still multiply by in two factors of bfloat16."""
MOST_SCALE = 128.0
"""Of FP8's: kernels have them 2 ** 120 times as large, in bfloat16."""
_FP8: tuple[Numbers, ...] = ("fp8", "fp8_rows")
_WORD_BYTES = 4
_ZERO_BITS = 0xFF
_MIDDLE = 0x80
_MOST_INTEGER = 127.0
_MOST_HALF = 65504.0
"""The largest float16."""
_ROWS, _FOURS, _EIGHTS = (2, 8), (4, 4, 4, 2), (2, 4, 2, 4, 2)
"""Of a patch: how many h, g; of codes of 4 bits i, p, t, e; of 8 bits s, k, p, t, e."""
_ORDER_FOURS, _ORDER_NF4, _ORDER_EIGHTS = (0, 1, 2, 5, 3, 6, 4), (0, 1, 2, 5, 3, 4, 6), (0, 3, 1, 2, 6, 4, 7, 5)
"""Of (patch, h, g, i, p, t, e), the same of "nf4", and (patch, h, g, s, k, p, t, e), in memory."""
_P = 5
_PLACES = torch.arange(PATCH_ROWS * PATCH_COLUMNS).unsqueeze(0)
_PLACES_FOURS, _PLACES_NF4 = (
    _PLACES.view(1, *_ROWS, *_FOURS).permute(*order).flatten() for order in (_ORDER_FOURS, _ORDER_NF4)
)
_PLACES_EIGHTS = _PLACES.view(1, *_ROWS, *_EIGHTS).flip(_P).permute(*_ORDER_EIGHTS).flatten()
"""Which of a patch's codes, row by row, are in memory one after another."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of floats of 4 bits, by their codes."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""What codes of NF4 stand for (arXiv:2305.14314, as bitsandbytes has it). In patches these numbers are bfloat16s."""


def patch_bytes(numbers: Numbers, group: int) -> int:
    """Of a patch. `group`: columns that share a scale."""
    words = 1 if numbers in ("mxfp4", "mxfp8", *_FP8) else PATCH_COLUMNS // group
    return _code_bytes(numbers) + words * PATCH_ROWS * _WORD_BYTES


def pack_integers(numbers: Numbers, codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Numbers (code - zero point) * scale: uint8 [R / 16, bytes], patches beside each other, the last of them filled up
    with zeros.

    codes: uint8 [R, K], of "int4" 0 to 15; R is a multiple of 16. scales: float32 [R, G], of which 16 bits of the
    mantissa are kept. zeros: [R, G], integers from 0 to MOST_ZERO. G is the number of groups of `group` columns, the
    last of which may be less.
    """
    # Rounded to the nearest number whose last bits are free.
    words = scales.contiguous().view(torch.int32) + (_ZERO_BITS + 1) // 2 & ~_ZERO_BITS | zeros.to(torch.int32)
    is_int4 = numbers == "int4"
    return _with_words(codes if is_int4 else codes ^ _MIDDLE, words, group, _pack_fours if is_int4 else _pack_eights)


def pack_affine(numbers: Numbers, codes: Tensor, scales: Tensor, offsets: Tensor, group: int) -> Tensor:
    """The same of numbers code * scale + offset: codes uint8, of "affine4" 0 to 15, of "affine8" to 127; scales and
    offsets float32 [R, G], rounded to float16, of which the largest stands for larger ones."""
    halves = [
        torch.where(each.isfinite(), each.clamp(-_MOST_HALF, _MOST_HALF), each).half() for each in (scales, offsets)
    ]
    low, high = (each.contiguous().view(torch.int16).int() for each in halves)
    pack = _pack_fours if numbers == "affine4" else _pack_eights
    return _with_words(codes, high << 16 | low & 0xFFFF, group, pack)


def pack_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """The same of numbers code * scale: codes of CODES [R, K], none of them NaN, scales float32 up to MOST_SCALE, one
    for each row and 128 columns."""
    across = scales.shape[1]
    in_bytes = _pack_eights(F.pad(codes.view(torch.uint8), (0, across * PATCH_COLUMNS - codes.shape[1])))
    return _joined(in_bytes, _patches_of(scales.float(), 1).contiguous().view(torch.uint8).flatten(1), len(codes))


def quantise_fp8(values: Tensor) -> Tensor:
    """As pack_fp8, of float32 numbers [R, K] rounded to codes, by a scale for each row and 128 columns."""
    across = -(-values.shape[1] // PATCH_COLUMNS)
    codes, scales = scale_rows(F.pad(values, (0, across * PATCH_COLUMNS - values.shape[1])).unflatten(1, (across, -1)))
    return pack_fp8(codes.flatten(1), scales)


def pack_mxfp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """The same of codes uint8 [R, K], 0 to 15, and exponents uint8, up to MOST_EXPONENT, one for each row and 32
    columns."""
    return _with_exponents(codes, exponents, _pack_fours)


def pack_mxfp8(codes: Tensor, exponents: Tensor) -> Tensor:
    """The same of codes of CODES, none of them NaN."""
    return _with_exponents(codes.view(torch.uint8), exponents, _pack_eights)


def pack_nf4(codes: Tensor, scales: Tensor, group: int) -> Tensor:
    """The same of numbers NF4[code] * scale, with NF4's rounded to bfloat16: codes uint8, 0 to 15, scales float32
    [R, G]."""
    return _with_words(codes, scales.float().contiguous().view(torch.int32), group, _pack_nf4)


def unpack(weight: Tensor, numbers: Numbers, group: int, columns: int) -> Tensor:
    """The numbers of a weight in patches, uint8 [R / 16, bytes]: float32 [R, columns]."""
    across = -(-columns // PATCH_COLUMNS)
    patches = weight.view(-1, patch_bytes(numbers, group))
    codes, words = patches.tensor_split((_code_bytes(numbers),), dim=1)
    if numbers in ("mxfp4", "mxfp8"):
        found = _e2m1(_unpack_fours(codes)) if numbers == "mxfp4" else _unpack_eights(codes).view(CODES).float()
        values = found.unflatten(2, (-1, group))
        # As bits: powers of two that are subnormal numbers may be flushed to 0.
        bits = words.reshape(-1, PATCH_ROWS, values.shape[2], 1).int() << 23
        scales = torch.where(bits == 0, torch.tensor(2.0**-127, device=bits.device), bits.view(torch.float32))
    elif numbers in _FP8:
        values = _unpack_eights(codes).view(CODES).float().unsqueeze(2)
        scales = words.contiguous().view(torch.float32).view(-1, PATCH_ROWS, 1, 1)
    elif numbers in ("affine4", "affine8"):
        found = _unpack_fours(codes) if numbers == "affine4" else _unpack_eights(codes)
        halves = words.contiguous().view(torch.float16).float().view(len(patches), -1, PATCH_ROWS, 2).transpose(1, 2)
        scales, offsets = halves.unsqueeze(-1).unbind(3)
        return _rows_of((found.unflatten(2, (-1, group)) * scales + offsets).flatten(2), across)[:, :columns]
    elif numbers == "nf4":
        table = torch.tensor(NF4, device=codes.device).bfloat16().float()
        values = table[_unpack_fours(codes, _ORDER_NF4).long()].unflatten(2, (-1, group))
        scales = words.contiguous().view(torch.float32).view(len(patches), -1, PATCH_ROWS, 1).transpose(1, 2)
    else:
        found = _unpack_fours(codes) if numbers == "int4" else _unpack_eights(codes) ^ _MIDDLE
        of_groups = words.contiguous().view(torch.int32).view(len(patches), -1, PATCH_ROWS, 1).transpose(1, 2)
        values = (found.int().unflatten(2, (-1, group)) - (of_groups & _ZERO_BITS)).float()
        scales = (of_groups & ~_ZERO_BITS).view(torch.float32)
    return _rows_of((values * scales).flatten(2), across)[:, :columns]


def patched_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, numbers: int, group: int, frozen: bool = False
) -> Tensor:
    kind = NUMBERS[numbers]
    wide = round_rows(x.float(), kind) if rounds_rows(kind, len(x)) else x.float()
    sums = F.linear(wide, unpack(weight, kind, group, x.shape[1]))
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


def rounds_rows(numbers: Numbers, rows: int) -> bool:
    """Whether products of so many rows, or tokens that go to experts, round activations as the weight is."""
    return numbers in MOST_UNROUNDED and rows > MOST_UNROUNDED[numbers]


def round_rows(x: Tensor, numbers: Numbers) -> Tensor:
    """x, float32 [T, K], quantised to INT8 or e4m3 and dequantised again: one scale a row, its largest magnitude / 127
    or 448."""
    if numbers == "fp8_rows":
        codes, scales = scale_rows(x)
        return codes.float() * scales.unsqueeze(-1)
    scales = row_scales(x, _MOST_INTEGER).unsqueeze(-1)
    return (x * (1 / scales)).round() * scales


def patched_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    limit: float,
    numbers: int,
    group: int,
) -> Tensor:
    inner, kind = gate_up.shape[1] // 2 * PATCH_ROWS, NUMBERS[numbers]
    rounds = rounds_rows(kind, len(x))

    def as_taken(rows: Tensor) -> Tensor:
        """Activations as both products take them."""
        rows = rows.to(x.dtype)
        return round_rows(rows.float(), kind) if rounds else rows

    taken = as_taken(x)
    unpacked = [
        unpack(weight.flatten(0, 1), kind, group, columns).to(taken.dtype).unflatten(0, (len(weight), -1))
        for weight, columns in ((gate_up, x.shape[1]), (down, inner))
    ]
    sums = experts.experts(
        taken, *unpacked, weights, chosen, gate_up_bias, down_bias, activation, limit, between=as_taken
    )
    return sums.to(x.dtype)


def _code_bytes(numbers: Numbers) -> int:
    return PATCH_ROWS * PATCH_COLUMNS // (2 if numbers in ("int4", "mxfp4", "affine4", "nf4") else 1)


def _pack_fours(codes: Tensor, places: Tensor = _PLACES_FOURS) -> Tensor:
    """Codes of 4 bits, uint8 [R, K], K a multiple of 128, in the patches' order: uint8 [patches, bytes]."""
    grid = _patches_of(codes, PATCH_COLUMNS).flatten(1)
    return _taken(grid, places[0::2]) | _taken(grid, places[1::2]) << 4


def _pack_nf4(codes: Tensor) -> Tensor:
    return _pack_fours(codes, _PLACES_NF4)


def _unpack_fours(packed: Tensor, order: tuple[int, ...] = _ORDER_FOURS) -> Tensor:
    """The inverse: uint8 [patches, 16, 128]."""
    return _in_rows(torch.stack((packed & 0xF, packed >> 4), dim=-1), (*_ROWS, *_FOURS), order)


def _pack_eights(codes: Tensor) -> Tensor:
    """The same of codes of 8 bits."""
    return _taken(_patches_of(codes, PATCH_COLUMNS).flatten(1), _PLACES_EIGHTS)


def _taken(grid: Tensor, places: Tensor) -> Tensor:
    """Columns by their numbers."""
    if grid.device.type == "cpu":
        # Numpy's are several times as fast as torch's, or as a copy of permuted dimensions.
        return torch.from_numpy(np.take(grid.numpy(), places.numpy(), axis=1))
    return grid[:, places.to(grid.device)]


def _unpack_eights(packed: Tensor) -> Tensor:
    places = _in_rows(packed, (*_ROWS, *_EIGHTS), _ORDER_EIGHTS)
    return places.view(-1, *_ROWS, *_EIGHTS).flip(_P).reshape(places.shape)


def _in_rows(codes: Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Codes that lie in that order of a patch's sizes, in the order of rows and columns: [patches, 16, 128]."""
    stored = codes.reshape(-1, *(sizes[axis - 1] for axis in order[1:]))
    return stored.permute(*(order.index(axis) for axis in range(len(order)))).reshape(-1, PATCH_ROWS, PATCH_COLUMNS)


def _with_words(codes: Tensor, words: Tensor, group: int, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Patches of codes [R, K] and of int32 words, one for each row and group of columns. `pack` orders codes."""
    each, across = PATCH_COLUMNS // group, -(-codes.shape[1] // PATCH_COLUMNS)
    filled = F.pad(codes, (0, across * PATCH_COLUMNS - codes.shape[1]))
    grid = _patches_of(F.pad(words, (0, across * each - words.shape[1])), each).transpose(1, 2).contiguous()
    return _joined(pack(filled), grid.view(torch.uint8).flatten(1), len(codes))


def _with_exponents(codes: Tensor, exponents: Tensor, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """The same of exponents uint8, one for each row and 32 columns."""
    each = PATCH_COLUMNS // GROUPS["mxfp4"][0]
    across = -(-exponents.shape[1] // each)
    in_bytes = pack(F.pad(codes, (0, across * PATCH_COLUMNS - codes.shape[1])))
    words = _patches_of(F.pad(exponents, (0, across * each - exponents.shape[1])), each).flatten(1)
    return _joined(in_bytes, words, len(codes))


def _joined(codes: Tensor, words: Tensor, rows: int) -> Tensor:
    return torch.cat((codes, words), dim=-1).view(rows // PATCH_ROWS, -1)


def _patches_of(grid: Tensor, columns: int) -> Tensor:
    """[R, C] as [patches, 16, columns], patches row by row."""
    return grid.unflatten(0, (-1, PATCH_ROWS)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(0, 1)


def _rows_of(patches: Tensor, across: int) -> Tensor:
    """The inverse of _patches_of, which stand `across` beside each other."""
    return patches.unflatten(0, (-1, across)).transpose(1, 2).flatten(0, 1).flatten(1)


def _e2m1(codes: Tensor) -> Tensor:
    return torch.tensor(E2M1, device=codes.device)[codes.long()]
