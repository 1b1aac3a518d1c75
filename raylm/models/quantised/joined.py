"""QuantisedTensor: a weight that its file has in parts, decoded piece by piece while it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models.quantised.codes import Codes
from raylm.models.quantised.grid import Grid
from raylm.models.quantised.matrix import Span, read

if TYPE_CHECKING:
    from pathlib import Path

    from raylm.models.checkpoint import CheckpointTensor, Room, Source
    from raylm.models.quantised.scheme import Scheme

S = TypeVar("S", bound="Source")
_CHUNK_VALUES = 1 << 19
"""Values decoded at a time: a piece stays in the CPU's cache between reading, decoding and copying."""


class Decoder(Protocol):
    """The decoded values of a weight [N, K]."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def least_rows(self) -> int:
        """Fewer rows at a time are slow to read."""
        ...

    def decode(self, rows: Span, columns: Span) -> Tensor:
        """float32. Only what these rows and columns need is read. Raises ConfigError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """(code - zero point) * scale, where blocks of rows and columns share a zero point and a scale; and a shift behind
    that, where there are shifts."""

    codes: Codes
    scales: Grid
    zeros: Grid | None
    rows: int
    """Of a block; 0: all."""
    columns: int
    """Of a block; 0: all."""
    groups: Groups | None = None
    """Which group each column is of, where groups are not of neighbours."""
    shifts: Grid | None = None
    """What is added."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def least_rows(self) -> int:
        return self.codes.least_rows

    @property
    def grid(self) -> tuple[Span, Span]:
        """All rows and all columns of scales and zero points."""
        rows, columns = self.shape
        down, across = -(-rows // self.rows) if self.rows else 1, -(-columns // self.columns) if self.columns else 1
        return (0, down), (0, across)

    def decode(self, rows: Span, columns: Span) -> Tensor:
        values = self.codes.read(rows, columns).float()
        down, across = _blocks(rows, self.rows), _blocks(columns, self.columns)
        if self.groups is not None:
            across = self.groups.read(columns)
        top, left = int(down.min()), int(across.min())
        spans = (top, int(down.max()) + 1), (left, int(across.max()) + 1)
        places: Tensor | None = across - left
        if self.groups is None and self.columns and not (columns[0] % self.columns or columns[1] % self.columns):
            # Whole groups, the usual case: twice as fast as a scale for each column.
            values, places = values.unflatten(1, (-1, self.columns)), None
        if self.zeros is not None:
            values = values - _spread(self.zeros.read(*spans), down - top, places)
        values = values * _spread(self.scales.read(*spans), down - top, places)
        if self.shifts is not None:
            values = values + _spread(self.shifts.read(*spans), down - top, places)
        return values.flatten(1)

    def numbers(self, rows: Span, columns: Span, width: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """float32 scales, zero points and shifts, a number for each row and each `width` columns, which are sorted by
        their groups; a dimension along which all are the same one may be 1. Groups are of a multiple of `width`
        columns, and so are `columns`."""
        down = _blocks(rows, self.rows)
        across = _blocks((columns[0] // width, columns[1] // width), self.columns // width)
        top, left = int(down.min()), int(across.min())
        spans = (top, int(down.max()) + 1), (left, int(across.max()) + 1)
        scales, zeros, shifts = (
            None if grid is None else _spread(grid.read(*spans), down - top, across - left)
            for grid in (self.scales, self.zeros, self.shifts)
        )
        assert scales is not None
        return scales, zeros, shifts


@dataclass(frozen=True, slots=True)
class Groups:
    """g_idx: for each column the group that it is of, int32 [K, 1]."""

    tensor: CheckpointTensor
    count: int

    def sizes(self, columns: int) -> Tensor:
        """How many of so many columns each group has: int64 [count]. Raises ConfigError as `read`."""
        return self.read((0, columns)).bincount(minlength=self.count)

    def order(self, columns: int) -> Tensor | None:
        """So many columns sorted by their groups, int64 [columns]; None where they are sorted already. Raises
        ConfigError as `read`."""
        found = self.read((0, columns))
        return None if bool((found[1:] >= found[:-1]).all()) else found.argsort(stable=True)

    def read(self, columns: Span) -> Tensor:
        """Raises ConfigError for a group that is not there."""
        found = read(self.tensor, columns, (0, 1)).long().flatten()
        for group in (int(found.min()), int(found.max())):
            if not 0 <= group < self.count:
                raise ConfigError(
                    f"{self.tensor.path}: tensor {self.tensor.name} names group {group}; allowed: 0 to {self.count - 1}"
                )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedTensor:
    """A matrix [N, K] with the interface of CheckpointTensor, whose pieces are decoded. `scheme` says how it is stored;
    `main` is the part with its codes."""

    name: str
    shape: tuple[int, ...]
    decoder: Decoder
    scheme: Scheme
    main: CheckpointTensor
    first: int = 0
    """The row of the whole weight that is the first here."""
    runs: tuple[int, int] | None = None
    """As CheckpointTensor has them."""
    rearrange: Callable[[Tensor], Tensor] | None = None
    row_unit: int = 1

    @property
    def path(self) -> Path:
        return self.main.path

    @property
    def offset(self) -> int:
        return self.main.offset

    def rows(self, first: int, count: int, runs: tuple[int, int] | None = None) -> QuantisedTensor:
        """As CheckpointTensor.rows."""
        return replace(self, shape=(count, *self.shape[1:]), first=self.first + first, runs=runs)

    def rearranged(self, rearrange: Callable[[Tensor], Tensor], *, row_unit: int = 1) -> QuantisedTensor:
        """As CheckpointTensor.rearranged."""
        return replace(self, rearrange=rearrange, row_unit=row_unit)

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces, in float32. Of the parts only what the rows and columns need is read."""
        columns = columns or (0, self.shape[1])
        for row, stretches in self.stretches(start, stop, columns):
            piece = torch.cat([self.decoder.decode(rows, columns) for rows in stretches])
            yield row, piece if self.rearrange is None else self.rearrange(piece)

    def stretches(
        self, start: int, stop: int, columns: Span, values: int = _CHUNK_VALUES
    ) -> Iterator[tuple[int, list[Span]]]:
        """Pieces of some `values` values each: their first rows, and which rows of the whole weight each piece is, as
        stretches of neighbours."""
        usual = max(values // max(1, columns[1] - columns[0]), self.decoder.least_rows)
        step = max(1, usual // self.row_unit) * self.row_unit
        for row in range(start, stop, step):
            yield row, list(self._stored(row, min(row + step, stop)))

    def _stored(self, start: int, stop: int) -> Iterator[Span]:
        """Rows of the whole weight that are rows start..stop-1 here, as stretches of neighbours."""
        taken, every = self.runs or (self.shape[0], self.shape[0])
        while start < stop:
            count = min(stop - start, taken - start % taken)
            place = self.first + start // taken * every + start % taken
            yield place, place + count
            start += count


@dataclass(frozen=True, slots=True)
class Kept(Generic[S]):
    """A tensor with the interface of CheckpointTensor whose pieces are not numbers: subclasses say what they are."""

    source: S

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def offset(self) -> int:
        return self.source.offset

    @property
    def row_unit(self) -> int:
        return self.source.row_unit

    def rearranged(self, rearrange: Callable[[Tensor], Tensor], *, row_unit: int = 1) -> Self:
        """As CheckpointTensor.rearranged: of whole rows."""
        return replace(self, source=self.source.rearranged(rearrange, row_unit=row_unit))


def _blocks(span: Span, size: int) -> Tensor:
    """The block that each row or column is of."""
    return torch.arange(*span) // size if size else torch.zeros(span[1] - span[0], dtype=torch.long)


def _spread(grid: Tensor, rows: Tensor, columns: Tensor | None) -> Tensor:
    """A number for each row and column, or, without `columns`, for each row and group of columns. A dimension of 1 is
    left so."""
    grid = grid[rows] if len(grid) > 1 else grid
    if columns is None:
        return grid.unsqueeze(-1)
    return grid[:, columns] if grid.shape[1] > 1 else grid
