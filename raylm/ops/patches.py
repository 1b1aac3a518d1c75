"""Weights as codes in patches of 16 rows and 128 columns, as patched_experts takes them, and the operator in terms of
torch's own.

A patch is codes and then words of scales, one for each row: of "fp8" (e4m3) a float32, of "mxfp4" (e2m1) the exponents
of four powers of two (e8m0), one for each 32 columns, and of "int4" one a group of columns, as int4_fallback has them.
Codes of 4 bits lie as in int4_fallback. Those of 8 bits, of rows numbered 8 h + g and columns numbered 64 s + 16 k +
8 p + 2 t + e, lie in the order of (s, h, g, t, k, e, 1 - p).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.ops import experts, int4_fallback
from raylm.ops.int4_fallback import PATCH_ROWS, pack_nibbles, patch_bytes, patches_of, rows_of, unpack_nibbles
from raylm.ops.scaled_fallback import CODES, scale_rows

Numbers = Literal["int4", "mxfp4", "fp8"]
NUMBERS: tuple[Numbers, ...] = ("int4", "mxfp4", "fp8")
"""The operator takes the place in this list."""
SHORT_PATCH = 128
"""Columns of a patch."""
MXFP4_GROUP = 32
"""Columns of a scale."""
MOST_EXPONENT = 191
"""Of MXFP4's scales: those of 2 ** 64 kernels still multiply by in two factors of bfloat16."""
_WORD_BYTES = 4
_ROWS, _COLUMNS = (2, 8), (2, 4, 2, 4, 2)
"""Of a patch of 8-bit codes: how many h, g; s, k, p, t, e."""
_ORDER = (0, 3, 1, 2, 6, 4, 7, 5)
"""Of (patch, h, g, s, k, p, t, e), in memory."""
_BACK = tuple(_ORDER.index(axis) for axis in range(len(_ORDER)))
_P = 5
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def short_patch_bytes(numbers: Numbers, group: int) -> int:
    """Of a patch. `group`: columns that share a scale."""
    if numbers == "int4":
        return patch_bytes(group, SHORT_PATCH)
    bits = 8 if numbers == "fp8" else 4
    return PATCH_ROWS * SHORT_PATCH * bits // 8 + PATCH_ROWS * _WORD_BYTES


def pack_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers code * scale: codes of CODES [R, K], none of them NaN, where R is a multiple of 16; scales float32, one
    for each row and 128 columns -> uint8 [R / 16, bytes], patches beside each other, the last of them filled up with
    zeros."""
    across = scales.shape[1]
    in_bytes = F.pad(codes.view(torch.uint8), (0, across * SHORT_PATCH - codes.shape[1]))
    grid = patches_of(in_bytes, SHORT_PATCH).view(-1, *_ROWS, *_COLUMNS).flip(_P).permute(*_ORDER)
    words = patches_of(scales.float(), 1).contiguous().view(torch.uint8).flatten(1)
    return torch.cat((grid.reshape(len(words), -1), words), dim=-1).view(len(codes) // PATCH_ROWS, -1)


def quantise_fp8(values: Tensor) -> Tensor:
    """As pack_fp8, of float32 numbers [R, K] rounded to codes, by a scale for each row and 128 columns."""
    across = -(-values.shape[1] // SHORT_PATCH)
    codes, scales = scale_rows(F.pad(values, (0, across * SHORT_PATCH - values.shape[1])).unflatten(1, (across, -1)))
    return pack_fp8(codes.flatten(1), scales)


def pack_mxfp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """The same of codes uint8 [R, K], 0 to 15, and exponents uint8, up to MOST_EXPONENT, one for each row and 32
    columns."""
    each = SHORT_PATCH // MXFP4_GROUP
    across = -(-exponents.shape[1] // each)
    nibbles = pack_nibbles(F.pad(codes, (0, across * SHORT_PATCH - codes.shape[1])), SHORT_PATCH)
    words = patches_of(F.pad(exponents, (0, across * each - exponents.shape[1])), each).flatten(1)
    return torch.cat((nibbles, words), dim=-1).view(len(codes) // PATCH_ROWS, -1)


def unpack(weight: Tensor, numbers: Numbers, group: int, columns: int) -> Tensor:
    """The numbers of a weight in patches, uint8 [R / 16, bytes]: float32 [R, columns]."""
    if numbers == "int4":
        return int4_fallback.unpack_int4(weight, group, columns, SHORT_PATCH)
    across = -(-columns // SHORT_PATCH)
    patches = weight.view(-1, short_patch_bytes(numbers, group))
    codes, words = patches.split((patches.shape[1] - PATCH_ROWS * _WORD_BYTES, PATCH_ROWS * _WORD_BYTES), dim=1)
    if numbers == "fp8":
        sizes = (*_ROWS, *_COLUMNS)
        stored = codes.reshape(-1, *(sizes[axis - 1] for axis in _ORDER[1:])).permute(*_BACK).flip(_P)
        values = stored.reshape(len(patches), PATCH_ROWS, SHORT_PATCH).view(CODES).float()
        scales = words.contiguous().view(torch.float32).view(-1, PATCH_ROWS, 1)
    else:
        values = _e2m1(unpack_nibbles(codes, SHORT_PATCH).view(-1, PATCH_ROWS, words.shape[1] // PATCH_ROWS, group))
        # As bits: powers of two that are subnormal numbers may be flushed to 0.
        bits = words.reshape(-1, PATCH_ROWS, values.shape[2], 1).int() << 23
        scales = torch.where(bits == 0, torch.tensor(2.0**-127, device=bits.device), bits.view(torch.float32))
    return rows_of((values * scales).flatten(1).view(-1, PATCH_ROWS, SHORT_PATCH), across)[:, :columns]


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
    inner = gate_up.shape[1] // 2 * PATCH_ROWS
    unpacked = [
        unpack(weight.flatten(0, 1), NUMBERS[numbers], group, columns).to(x.dtype).unflatten(0, (len(weight), -1))
        for weight, columns in ((gate_up, x.shape[1]), (down, inner))
    ]
    return experts.experts(x, *unpacked, weights, chosen, gate_up_bias, down_bias, activation, limit)


def _e2m1(codes: Tensor) -> Tensor:
    table = torch.tensor([*_E2M1, *(-each for each in _E2M1)], device=codes.device)
    return table[codes.long()]
