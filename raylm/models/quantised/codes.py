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
"""Rows of a weight whose file has it, or its scales, by columns: a row of the file gives some 512 bytes at a time
then, or more."""

_SIGNS = 0x88
"""Of a byte's two integers: turned over, they are what is 8 more without a sign."""
TILE_ROWS, TILE_COLUMNS, TILE_WORDS = 8, 128, 128
"""Of tinygemm's."""
_OF_ROW = (4, 4, 2, 4)
"""Of a tile's row: how many lanes q, words w, halves of a word, and j."""
_IN_ROWS = (0, 2, 1, 4, 6, 3, 5)
"""Of (tile down, tile across, row, q, w, half, j): the order of rows and columns."""


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
class SignedNibbles:
    """Two integers with a sign a byte, the lower four bits first, as 0 to 15: 8 is added to each (TorchAO)."""

    tensor: CheckpointTensor
    least_rows = _LEAST_ROWS

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], 2 * self.tensor.shape[1]

    def read(self, rows: Span, columns: Span) -> Tensor:
        first, last = columns[0] // 2, -(-columns[1] // 2)
        data = read(self.tensor, rows, (first, last)).view(torch.uint8) ^ _SIGNS
        codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
        return codes[:, columns[0] - 2 * first : columns[1] - 2 * first]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Integers 0 to 15 in the order in which the lanes of a warp take them (tinygemm's kernels, inner_k_tiles 8): int32
    [tiles of 8 rows, tiles of 128 columns * 32 lanes * 4 words], filled up beyond the weight's `shape`.

    Of a tile, lane 4 r + q has of row r in word w the columns 32 w + 8 j + 2 q, for j of 0 to 3 in its lower four
    integers, and in its upper four the columns behind these.
    """

    tensor: CheckpointTensor
    shape: tuple[int, int]
    least_rows = _LEAST_ROWS

    def read(self, rows: Span, columns: Span) -> Tensor:
        down = rows[0] // TILE_ROWS, -(-rows[1] // TILE_ROWS)
        across = columns[0] // TILE_COLUMNS, -(-columns[1] // TILE_COLUMNS)
        words = read(self.tensor, down, (across[0] * TILE_WORDS, across[1] * TILE_WORDS))
        data = words.contiguous().view(torch.uint8)
        lanes = torch.stack((data & 0xF, data >> 4), dim=-1).view(len(words), -1, TILE_ROWS, *_OF_ROW)
        codes = lanes.permute(*_IN_ROWS).reshape(TILE_ROWS * len(words), -1)
        top, left = down[0] * TILE_ROWS, across[0] * TILE_COLUMNS
        return codes[rows[0] - top : rows[1] - top, columns[0] - left : columns[1] - left]


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
        return self.table[self.bits(rows, columns).long()]

    def bits(self, rows: Span, columns: Span) -> Tensor:
        """The codes: uint8, 0 to 15."""
        first, last = columns[0] // 2, -(-columns[1] // 2)
        data = read(self.tensor, rows, (first, last))
        codes = torch.stack((data >> 4, data & 0xF), dim=-1).flatten(-2)
        return codes[:, columns[0] - 2 * first : columns[1] - 2 * first]


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
