"""Tensors of a checkpoint, read in pieces: a file's bytes go through a small buffer straight into the parameters.

No file is mapped and no tensor is held whole, so that loading needs little more memory than the weights themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.layers.slots import BlockForm
from raylm.models.mxfp4 import BYTES, VALUES, decode
from raylm.models.quantised.joined import QuantisedTensor
from raylm.models.quantised.patched import PatchedTensor
from raylm.models.quantised.repacked import RepackedTensor

_CHUNK_VALUES = 1 << 19
"""Values decoded at a time: a piece stays in the CPU's cache between reading, decoding and copying."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How values lie in a file: `decode` turns bytes (uint8 [n]) of whole blocks into a tensor of one dimension."""

    values_per_block: int
    bytes_per_block: int
    decode: Callable[[np.ndarray], Tensor]
    form: BlockForm | None = None
    """What kernels may know such blocks as."""
    dtype: torch.dtype | None = None
    """Of values that lie one after another; None where they are in blocks."""


class Room(Protocol):
    """Memory that pieces are read into, one after the other."""

    @property
    def num_bytes(self) -> int:
        """Of a piece at most."""
        ...

    def take(self, num_bytes: int) -> np.ndarray:
        """For the next piece, uint8 [num_bytes]."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a file. `shape` is in torch's order, `offset` in bytes from the start of the file.

    `rearrange`, where given, is applied to every piece; pieces begin and end at multiples of `row_unit` rows then.
    """

    name: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    encoding: Encoding
    row_unit: int = 1
    rearrange: Callable[[Tensor], Tensor] | None = None
    runs: tuple[int, int] | None = None
    """(n, m): of every m rows of the file the first n are the tensor's."""

    def rows(self, first: int, count: int, runs: tuple[int, int] | None = None) -> CheckpointTensor:
        """Some of its rows, along the first dimension, as a tensor of their own: `count` of them from `first` on, with
        `runs` only the first n of every m."""
        skipped = first * prod(self.shape[1:]) // self.encoding.values_per_block * self.encoding.bytes_per_block
        return replace(self, shape=(count, *self.shape[1:]), offset=self.offset + skipped, runs=runs)

    def item(self, index: int) -> CheckpointTensor:
        """One of its first dimension, as a tensor of a dimension less."""
        return replace(self.rows(index, 1), shape=self.shape[1:])

    def flat(self) -> CheckpointTensor:
        """As a matrix: all dimensions but the first are one."""
        return replace(self, shape=(self.shape[0], prod(self.shape[1:])))

    def rearranged(self, rearrange: Callable[[Tensor], Tensor], *, row_unit: int = 1) -> CheckpointTensor:
        """With `rearrange` on every piece."""
        return replace(self, rearrange=rearrange, row_unit=row_unit)

    def in_blocks(self) -> CheckpointTensor:
        """A matrix's blocks, undecoded: uint8 [rows, bytes of a row]. Raises ConfigError where a block spans rows."""
        rows, columns = self.shape
        self._check_width(columns)
        return replace(self, shape=(rows, self._bytes(columns)), encoding=plain(torch.uint8))

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values // self.encoding.values_per_block * self.encoding.bytes_per_block

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows start..stop-1 (along the first dimension) in order, as pairs of first row and piece [rows, ...].

        `columns` takes of a matrix's rows the columns columns[0]..columns[1]-1 alone; no others are read where the
        file's blocks allow it. Pieces that are what the file has lie in `room`, and are as large as it takes.
        Raises ConfigError when the file ends too early or its blocks do not fit the rows.
        """
        width = prod(self.shape[1:])
        self._check_width(width)
        first, last = columns or (0, width)
        skips = (first, last) != (0, width) and not (first % self._block or last % self._block)
        read = (first, last) if skips else (0, width)
        shape = (last - first,) if skips else self.shape[1:]
        if room is not None and not self._lies_in(room):
            room = None
        values = _CHUNK_VALUES if room is None else room.num_bytes // self._bytes(1)
        step = max(1, values // max(1, width) // self.row_unit) * self.row_unit
        with self.path.open("rb", buffering=0) as file:
            descriptor = file.fileno()
            for row, rows in self._steps(start, stop, step):
                raw = self._read(descriptor, self._place(row), rows, self._bytes(read[0]), self._bytes(read[1]), room)
                piece = self.encoding.decode(raw).view(rows, *shape)
                if not skips and columns is not None:
                    piece = piece[:, first:last]
                yield row, piece if self.rearrange is None else self.rearrange(piece)

    def _check_width(self, width: int) -> None:
        if width % self._block:
            raise ConfigError(
                f"{self.path}: tensor {self.name} has rows of {width} values, which blocks of {self._block} cannot fill"
            )

    def _lies_in(self, room: Room) -> bool:
        """Whether pieces are bytes of the file, of which a row has room."""
        is_plain = self._block == 1 and self.rearrange is None
        return is_plain and self._bytes(prod(self.shape[1:])) <= room.num_bytes

    def _steps(self, start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
        """First rows and numbers of rows, which are neighbours in the file."""
        row = start
        while row < stop:
            rows = min(step, stop - row)
            if self.runs is not None:
                rows = min(rows, self.runs[0] - row % self.runs[0])
            yield row, rows
            row += rows

    def _place(self, row: int) -> int:
        """The number of a row in the file."""
        if self.runs is None:
            return row
        taken, every = self.runs
        return row // taken * every + row % taken

    @property
    def _block(self) -> int:
        return self.encoding.values_per_block

    def _bytes(self, num_values: int) -> int:
        return num_values // self._block * self.encoding.bytes_per_block

    def _read(self, descriptor: int, row: int, rows: int, first: int, last: int, room: Room | None) -> np.ndarray:
        """The bytes first..last-1 of each of the rows, one row behind the other, in `room` or in new memory."""
        row_bytes = self._bytes(prod(self.shape[1:]))
        runs, length = (1, rows * row_bytes) if last - first == row_bytes else (rows, last - first)
        raw = np.empty(runs * length, dtype=np.uint8) if room is None else room.take(runs * length)
        for i, run in enumerate(raw.reshape(runs, length)):
            self._fill(descriptor, self.offset + (row + i) * row_bytes + first, run)
        return raw

    def _fill(self, descriptor: int, offset: int, raw: np.ndarray) -> None:
        view = memoryview(raw)
        while view:
            count = os.preadv(descriptor, [view], offset)
            if not count:
                raise ConfigError(f"{self.path}: the file ends inside tensor {self.name}: it is cut short")
            view, offset = view[count:], offset + count


@dataclass(frozen=True, slots=True)
class MXFP4Tensor:
    """A matrix [N, K] of 4-bit floats in blocks of 32 with one scale each (OCP Microscaling, MXFP4). The files have
    `blocks` [N, K / 32 * 16], two values a byte, and `scales` [N, K / 32], both uint8."""

    blocks: CheckpointTensor | SteppedTensor
    scales: CheckpointTensor | SteppedTensor

    @property
    def name(self) -> str:
        return self.blocks.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks.shape[0], 2 * self.blocks.shape[1]

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def offset(self) -> int:
        return self.blocks.offset

    @property
    def row_unit(self) -> int:
        return 1

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces, in float32."""
        first, last = columns or (0, self.shape[1])
        low, high = first // VALUES, -(-last // VALUES)  # blocks of a row
        step = max(1, _CHUNK_VALUES // max(1, self.shape[1]))
        for row in range(start, stop, step):
            end = min(row + step, stop)
            codes, scales = self._stored(row, end, low, high)
            yield row, decode(codes.numpy(), scales.numpy())[:, first - low * VALUES : last - low * VALUES]

    def codes(self, start: int, stop: int, columns: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [stop - start, columns], 0 to 15, and exponents of scales, for each block one. `columns` are of
        whole blocks."""
        stored, scales = self._stored(start, stop, columns[0] // VALUES, columns[1] // VALUES)
        return torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(1), scales

    def _stored(self, start: int, stop: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Bytes of codes and scales of a row's blocks `low` to `high`."""
        codes, scales = (
            torch.cat([piece for _, piece in tensor.pieces(start, stop, (low * size, high * size))])
            for tensor, size in ((self.blocks, BYTES), (self.scales, 1))
        )
        return codes, scales


@dataclass(frozen=True, slots=True)
class TransposedTensor:
    """A matrix that its file has as columns: `source` is as the file has it, of whose columns these are `count` from
    `first` on."""

    source: CheckpointTensor
    first: int
    count: int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, self.source.shape[0]

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def offset(self) -> int:
        return self.source.offset

    @property
    def row_unit(self) -> int:
        return self.count

    def rows(self, first: int, count: int, runs: tuple[int, int] | None = None) -> TransposedTensor:
        """As CheckpointTensor.rows, but neighbours alone."""
        assert runs is None
        return replace(self, first=self.first + first, count=count)

    def rearranged(self, rearrange: Callable[[Tensor], Tensor], *, row_unit: int = 1) -> TransposedTensor:
        raise NotImplementedError(f"{self.name} is stored as columns, whose rows cannot be rearranged")

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces, but all at once: no large model is stored so."""
        first, last = columns or (0, self.source.shape[0])
        read = self.source.pieces(first, last, (self.first + start, self.first + stop))
        yield start, torch.cat([piece for _, piece in read]).t()


@dataclass(frozen=True, slots=True)
class SteppedTensor:
    """Every `step`-th row of `source` from `first` on, `count` of them. The rows between are read as well: reading row
    by row would take far longer."""

    source: Source
    first: int
    count: int
    step: int

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, *self.source.shape[1:]

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def offset(self) -> int:
        return self.source.offset

    @property
    def row_unit(self) -> int:
        # What comes all at once is not asked for twice.
        return 1 if self.source.row_unit == 1 else self.count

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces."""
        begin, end = self.first + start * self.step, self.first + (stop - 1) * self.step + 1
        for row, piece in self.source.pieces(begin, end, columns):
            skipped = (self.first - row) % self.step
            if skipped < len(piece):
                yield (row + skipped - self.first) // self.step, piece[skipped :: self.step]


FileTensor = CheckpointTensor | QuantisedTensor
"""A tensor of a checkpoint by its own name."""
Source = FileTensor | RepackedTensor | PatchedTensor | TransposedTensor | MXFP4Tensor | SteppedTensor


def every(source: Source, step: int, *, first: int, count: int) -> Source:
    """Every `step`-th row of `source` from `first` on, `count` of them."""
    if isinstance(source, MXFP4Tensor):
        # The rows between are not decoded.
        parts = (SteppedTensor(part, first, count, step) for part in (source.blocks, source.scales))
        return MXFP4Tensor(*parts)
    return SteppedTensor(source, first, count, step)


def plain(dtype: torch.dtype) -> Encoding:
    """Values one after another, little-endian."""
    return Encoding(1, dtype.itemsize, lambda raw: torch.from_numpy(raw).view(dtype), dtype=dtype)


def digest(tensors: Iterable[FileTensor]) -> str:
    """Tells checkpoints apart without reading all of them: by the name, the shape and the first row of every tensor.
    Training, merging and conversion change some of these."""
    found = sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        found.update(f"{tensor.name} {list(tensor.shape)} ".encode())
        # A row of a vector is one value: all of them.
        rows = tensor.shape[0] if len(tensor.shape) == 1 else tensor.row_unit
        for _, piece in tensor.pieces(0, rows) if tensor.shape else ():
            found.update(piece.contiguous().view(torch.uint8).numpy())
    return found.hexdigest()
