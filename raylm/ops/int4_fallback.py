"""raylm.ops.int4 in terms of torch's own operators, and how its weights lie in memory.

A weight is patches of 16 rows, numbered 8 h + g, and 512 columns, numbered 128 c + 32 i + 8 p + 2 t + e: 4,096 bytes
of codes, and then for each group of columns and each row a word, the bits of its float32 scale whose lowest 8 bits are
its zero point. Codes lie in the order of (c, h, g, t, i, e, p), two a byte, the first of them in the lower bits: so g
and t say which of a warp's lanes takes 16 bytes of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH_ROWS, PATCH_COLUMNS = 16, 512
MOST_ZERO = 127
"""The largest zero point: float16 and bfloat16 hold what is left of it and a code."""
_WORD_BYTES = 4
_ZERO_BITS = 0xFF
_ROWS, _COLUMNS = (2, 8), (4, 4, 4, 2)
"""Of a patch: how many h, g; i, p, t, e."""
_ORDER = (0, 3, 1, 2, 6, 4, 7, 5)
"""Of (patch, h, g, c, i, p, t, e), in memory."""
_BACK = tuple(_ORDER.index(axis) for axis in range(len(_ORDER)))


def patch_bytes(group: int, width: int = PATCH_COLUMNS) -> int:
    """Of a patch of `width` columns whose groups have `group` columns."""
    return PATCH_ROWS * width // 2 + width // group * PATCH_ROWS * _WORD_BYTES


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor, group: int, width: int = PATCH_COLUMNS) -> Tensor:
    """Numbers (code - zero point) * scale as int4_linear takes them: uint8 [R / 16, bytes], patches of `width` columns
    beside each other, the last of them filled up with zeros.

    codes: uint8 [R, K], 0 to 15; R is a multiple of 16. scales: float32 [R, G], of which 16 bits of the mantissa are
    kept. zeros: [R, G], integers from 0 to MOST_ZERO. G is the number of groups of `group` columns, the last of which
    may be less.
    """
    columns = codes.shape[1]
    across, each = -(-columns // width), width // group
    nibbles = pack_nibbles(F.pad(codes, (0, across * width - columns)), width)
    # Rounded to the nearest number whose last bits are free.
    bits = scales.contiguous().view(torch.int32) + (_ZERO_BITS + 1) // 2 & ~_ZERO_BITS | zeros.to(torch.int32)
    words = patches_of(F.pad(bits, (0, across * each - bits.shape[1])), each).transpose(1, 2).contiguous()
    in_bytes = torch.cat((nibbles, words.view(torch.uint8).flatten(1)), dim=-1)
    return in_bytes.view(len(codes) // PATCH_ROWS, -1)


def unpack_int4(weight: Tensor, group: int, columns: int, width: int = PATCH_COLUMNS) -> Tensor:
    """The numbers that pack_int4 made a weight of: float32 [R, columns]."""
    patches = weight.view(-1, patch_bytes(group, width))
    code_bytes = PATCH_ROWS * width // 2
    codes = unpack_nibbles(patches[:, :code_bytes], width).view(len(patches), PATCH_ROWS, -1, group)
    words = patches[:, code_bytes:].contiguous().view(torch.int32).view(len(patches), -1, PATCH_ROWS).transpose(1, 2)
    scales, zeros = (words & ~_ZERO_BITS).view(torch.float32), words & _ZERO_BITS
    numbers = (codes - zeros.unsqueeze(-1)).float() * scales.unsqueeze(-1)
    return rows_of(numbers.flatten(2), -(-columns // width))[:, :columns]


def pack_nibbles(codes: Tensor, width: int) -> Tensor:
    """Codes of 4 bits, uint8 [R, K], K a multiple of `width`, in the patches' order: uint8 [patches, bytes]."""
    nibbles = patches_of(codes, width).view(-1, *_ROWS, width // 128, *_COLUMNS).permute(*_ORDER)
    pairs = nibbles.reshape(len(nibbles), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_nibbles(packed: Tensor, width: int) -> Tensor:
    """The inverse: uint8 [patches, 16, width]."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    sizes = (*_ROWS, width // 128, *_COLUMNS)
    stored = nibbles.view(-1, *(sizes[axis - 1] for axis in _ORDER[1:]))
    return stored.permute(*_BACK).reshape(len(packed), PATCH_ROWS, width)


def patches_of(grid: Tensor, columns: int) -> Tensor:
    """[R, C] as [patches, 16, columns], patches row by row."""
    return grid.unflatten(0, (-1, PATCH_ROWS)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(0, 1)


def rows_of(patches: Tensor, across: int) -> Tensor:
    """The inverse of patches_of, which stand `across` beside each other."""
    return patches.unflatten(0, (-1, across)).transpose(1, 2).flatten(0, 1).flatten(1)


def int4_linear(x: Tensor, weight: Tensor, group: int, bias: Tensor | None, frozen: bool = False) -> Tensor:
    sums = F.linear(x.float(), unpack_int4(weight, group, x.shape[1]))
    return (sums if bias is None else sums + bias.float()).to(x.dtype)
