"""Parts of a matrix in a file, and integers that are packed into words."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from raylm.models.checkpoint import CheckpointTensor

Span = tuple[int, int]
"""The first, and the one behind the last."""
_WORD = 32


def read(tensor: CheckpointTensor, rows: Span, columns: Span) -> Tensor:
    """Some rows and columns of a matrix. Bytes outside of the columns are not read."""
    pieces = [piece for _, piece in tensor.pieces(*rows, columns)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def shaped(tensor: CheckpointTensor, shape: tuple[int, int]) -> CheckpointTensor:
    """The same values as a matrix of another shape."""
    assert prod(shape) == tensor.num_values
    return replace(tensor, shape=shape)


def words_of(values: Span, bits: int) -> Span:
    """The words of 32 bits that hold integers values[0]..values[1]-1 of a row."""
    return values[0] * bits // _WORD, -(-values[1] * bits // _WORD)


def unpack(words: Tensor, bits: int, values: Span) -> Tensor:
    """Integers of `bits` bits that lie one behind the other, lower bits first, in the words of each row: int32
    [N, words_of(values)] -> [N, values[1] - values[0]], without a sign."""
    count, skipped = values[1] - values[0], values[0] - words_of(values, bits)[0] * _WORD // bits
    if _WORD % bits == 0:
        data = words.contiguous().view(torch.uint8)
        if bits < 8:
            mask = (1 << bits) - 1
            data = torch.stack([data >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten(-2)
        return data[:, skipped : skipped + count]
    first = torch.arange(*values) * bits - words_of(values, bits)[0] * _WORD
    word, shift = first // _WORD, first % _WORD
    wide = words.long() & 0xFFFFFFFF
    wide = torch.cat((wide, wide[:, :1]), dim=1)  # the last integer's upper bits are none of this column's
    low, high = wide[:, word] >> shift, wide[:, word + 1] << (_WORD - shift)
    return (low | high) & (1 << bits) - 1
