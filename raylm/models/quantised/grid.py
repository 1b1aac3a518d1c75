"""Scales and zero points of a weight [N, K]: one number for each block of rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from raylm.errors import ConfigError
from raylm.models.mxfp4 import e8m0
from raylm.models.quantised.matrix import Span, read, unpack, words_of

if TYPE_CHECKING:
    from raylm.models.checkpoint import CheckpointTensor
    from raylm.models.quantised.codes import Codes


class Grid(Protocol):
    """Numbers [R, C], of which each is for a block of the weight."""

    def read(self, rows: Span, columns: Span) -> Tensor:
        """float32."""
        ...


@dataclass(frozen=True, slots=True)
class Factor:
    """A scale of the whole weight, which all others are multiplied by, or divided by."""

    tensor: CheckpointTensor
    divides: bool

    def apply(self, scales: Tensor) -> Tensor:
        """Raises ConfigError for a number that is none, or not above 0."""
        value = read(self.tensor, (0, 1), (0, 1)).float()
        if not (bool(value.isfinite().all()) and float(value) > 0):
            raise ConfigError(
                f"{self.tensor.path}: tensor {self.tensor.name} is {float(value)}; allowed: a number above 0"
            )
        return scales / value if self.divides else scales * value


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales as the file has them, [R, C] or `transposed`."""

    tensor: CheckpointTensor
    transposed: bool = False
    signed: bool = False
    """Scales may be negative: methods that learn them end up with such ones."""
    factor: float = 1.0
    whole: Factor | None = None

    def read(self, rows: Span, columns: Span) -> Tensor:
        """Raises ConfigError for a scale that is no number, or has a sign where it cannot have one."""
        found = read(self.tensor, columns, rows).t() if self.transposed else read(self.tensor, rows, columns)
        values = e8m0(found.numpy()) if found.dtype == torch.uint8 else found.float()
        check(self.tensor, values, signed=self.signed)
        values = values * self.factor if self.factor != 1.0 else values
        return values if self.whole is None else self.whole.apply(values)


@dataclass(frozen=True, slots=True)
class PlainZeros:
    """Zero points, a number each: [R, C]. `offset` is added to them."""

    tensor: CheckpointTensor
    offset: int = 0

    def read(self, rows: Span, columns: Span) -> Tensor:
        return read(self.tensor, rows, columns).float() + self.offset


@dataclass(frozen=True, slots=True)
class Shifts:
    """Numbers that are added behind the scale, as the file has them: [C, R]."""

    tensor: CheckpointTensor

    def read(self, rows: Span, columns: Span) -> Tensor:
        """Raises ConfigError for one that is no number."""
        values = read(self.tensor, columns, rows).t().float()
        check(self.tensor, values, signed=True)
        return values


@dataclass(frozen=True, slots=True)
class Paired:
    """Scales and shifts in turn, [C, 2 R]: those of which `place` is 0 or 1 (tinygemm)."""

    tensor: CheckpointTensor
    place: int

    def read(self, rows: Span, columns: Span) -> Tensor:
        """Raises ConfigError for one that is no number."""
        found = read(self.tensor, columns, (2 * rows[0], 2 * rows[1]))[:, self.place :: 2].t().float()
        check(self.tensor, found, signed=True)
        return found


@dataclass(frozen=True, slots=True)
class PackedZeros:
    """Zero points that are packed as codes are."""

    codes: Codes
    transposed: bool = False

    def read(self, rows: Span, columns: Span) -> Tensor:
        found = self.codes.read(columns, rows).t() if self.transposed else self.codes.read(rows, columns)
        return found.float()


@dataclass(frozen=True, slots=True)
class LessOneZeros:
    """GPTQ's first format: int32 [C, words] of zero points [R, C], less 1 each. A word as a whole had the ones
    subtracted from it, so a zero point of 0 has borrowed from its neighbour; adding them to the word undoes both."""

    tensor: CheckpointTensor
    bits: int

    def read(self, rows: Span, columns: Span) -> Tensor:
        words = read(self.tensor, columns, words_of(rows, self.bits))
        if 32 % self.bits:
            # Integers that cross words were each taken for itself.
            found = unpack(words, self.bits, rows) + 1 & (1 << self.bits) - 1
            return found.t().float()
        ones = sum(1 << shift for shift in range(0, 32, self.bits))
        return unpack((words.long() + ones).to(torch.int32), self.bits, rows).t().float()


@dataclass(frozen=True, slots=True)
class Constant:
    """The same zero point for all."""

    value: float

    def read(self, rows: Span, columns: Span) -> Tensor:
        return torch.full((1, 1), self.value)


def check(tensor: CheckpointTensor, values: Tensor, *, signed: bool) -> None:
    """Raises ConfigError for scales that are no numbers, or negative where not `signed`."""
    if not bool(values.isfinite().all()):
        raise ConfigError(f"{tensor.path}: tensor {tensor.name} holds scales that are no finite numbers")
    if not signed and bool((values < 0).any()):
        raise ConfigError(f"{tensor.path}: tensor {tensor.name} holds negative scales; allowed: 0 and above")
