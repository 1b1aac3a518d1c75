"""Codes of a weight [N, K], however they lie in its file: some rows and columns of them at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from raylm.models.mxfp4 import e2m1
from raylm.models.quantised.matrix import Span, read, unpack, words_of

if TYPE_CHECKING:
    from raylm.models.checkpoint import CheckpointTensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of the integers of an int32, lowest bits first: the columns that they are of."""
_AWQ_COLUMNS, _AWQ_BITS, _AWQ_MASK = 8, 4, 0xF
_LEAST_ROWS, _LEAST_AWQ_ROWS = 256, 1024
"""Rows of a weight whose file has it by columns: a row of the file gives some 512 bytes at a time then, or more."""


class Codes(Protocol):
    """Codes [N, K]."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def least_rows(self) -> int:
        """Fewer rows at a time are slow to read."""
        ...

    def read(self, rows: Span, columns: Span) -> Tensor:
        """Of any type that float32 holds exactly."""
        ...


@dataclass(frozen=True, slots=True)
class Values:
    """A code an element."""

    tensor: CheckpointTensor
    least_rows = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def read(self, rows: Span, columns: Span) -> Tensor:
        return read(self.tensor, rows, columns)


@dataclass(frozen=True, slots=True)
class Nibbles:
    """Two floats (e2m1) a byte, the lower four bits first."""

    tensor: CheckpointTensor
    least_rows = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], 2 * self.tensor.shape[1]

    def read(self, rows: Span, columns: Span) -> Tensor:
        first, last = columns[0] // 2, -(-columns[1] // 2)
        values = e2m1(read(self.tensor, rows, (first, last)).numpy())
        return values[:, columns[0] - 2 * first : columns[1] - 2 * first]

    def bits(self, rows: Span, columns: Span) -> Tensor:
        """The same as they are stored: uint8, 0 to 15. `columns` begin and end with a byte."""
        data = read(self.tensor, rows, (columns[0] // 2, columns[1] // 2))
        return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class TableNibbles:
    """Two codes a byte, the upper four bits first; `table` has the values of the 16 codes (bitsandbytes)."""

    tensor: CheckpointTensor
    table: Tensor
    least_rows = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], 2 * self.tensor.shape[1]

    def read(self, rows: Span, columns: Span) -> Tensor:
        first, last = columns[0] // 2, -(-columns[1] // 2)
        data = read(self.tensor, rows, (first, last))
        codes = torch.stack((data >> 4, data & 0xF), dim=-1).flatten(-2)
        return self.table[codes[:, columns[0] - 2 * first : columns[1] - 2 * first].long()]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Integers of a row one behind the other in int32: [N, words]."""

    tensor: CheckpointTensor
    bits: int
    num_columns: int
    least_rows = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.num_columns

    def read(self, rows: Span, columns: Span) -> Tensor:
        return unpack(read(self.tensor, rows, words_of(columns, self.bits)), self.bits, columns)


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """The transposed: int32 [words, N], where a column holds the integers of one row of the codes [N, K]."""

    tensor: CheckpointTensor
    bits: int
    num_columns: int
    least_rows = _LEAST_ROWS

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[1], self.num_columns

    def read(self, rows: Span, columns: Span) -> Tensor:
        words = read(self.tensor, words_of(columns, self.bits), rows).t()
        return unpack(words, self.bits, columns)


@dataclass(frozen=True, slots=True)
class AWQColumns:
    """The transposed weight as AWQ packs it: int32 [K, N / 8], eight rows of the weight in a word, in AWQ's order."""

    tensor: CheckpointTensor
    least_rows = _LEAST_AWQ_ROWS

    @property
    def shape(self) -> tuple[int, int]:
        return _AWQ_COLUMNS * self.tensor.shape[1], self.tensor.shape[0]

    def read(self, rows: Span, columns: Span) -> Tensor:
        first, last = rows[0] // _AWQ_COLUMNS, -(-rows[1] // _AWQ_COLUMNS)
        words = read(self.tensor, columns, (first, last)).t().contiguous()
        found = torch.empty(len(words), _AWQ_COLUMNS, words.shape[1], dtype=torch.uint8)
        for place, column in enumerate(_AWQ_ORDER):
            found[:, column] = words >> _AWQ_BITS * place & _AWQ_MASK
        skipped = rows[0] - first * _AWQ_COLUMNS
        return found.flatten(0, 1)[skipped : skipped + rows[1] - rows[0]]
