"""Weights of integers of 4 bits or fewer in groups, put into patches while they are read: GPUs' kernels take these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raylm import ops
from raylm.layers.slots import Int4Form
from raylm.models.quantised.grid import PlainZeros
from raylm.models.quantised.joined import Grouped, Kept, QuantisedTensor
from raylm.models.quantised.matrix import Span
from raylm.models.quantised.scheme import Scheme

if TYPE_CHECKING:
    from raylm.models.checkpoint import Room

_BITS = 4
_LAYOUTS = ("packed", "gptq", "awq")


def form_of(scheme: Scheme) -> Int4Form | None:
    """The patches that hold weights which are stored so; None where none do."""
    has_own_groups = scheme.ordered and scheme.columns > 0
    is_integer = scheme.layout in _LAYOUTS and scheme.bits <= _BITS and scheme.rows == 1
    if not is_integer or has_own_groups:
        return None
    return next((Int4Form(group) for group in reversed(ops.INT4_GROUPS) if scheme.columns % group == 0), None)


def int4_form(tensor: QuantisedTensor) -> Int4Form | None:
    """The patches that hold the weight's numbers; None where none do. Zero points that may be any number are read to
    find out."""
    form, decoder = form_of(tensor.scheme), tensor.decoder
    rows, columns = tensor.shape
    if form is None or not isinstance(decoder, Grouped) or decoder.zeros is None or rows % ops.PATCH_ROWS:
        return None
    if decoder.columns and columns % form.group:
        return None
    if isinstance(decoder.zeros, PlainZeros):
        zeros = decoder.zeros.read(*decoder.grid)
        if not bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros <= ops.MOST_ZERO)).all()):
            return None
    return form


@dataclass(frozen=True, slots=True)
class Int4Tensor(Kept):
    """A QuantisedTensor whose `int4_form` is `form`, in patches: uint8 [N / 16, bytes of a row of patches]."""

    form: Int4Form

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.source.shape
        return rows // ops.PATCH_ROWS, -(-columns // ops.PATCH_COLUMNS) * ops.patch_bytes(self.form.group)

    @property
    def row_unit(self) -> int:
        return lcm(self.source.row_unit, ops.PATCH_ROWS) // ops.PATCH_ROWS

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces. `columns` are bytes, of whole patches."""
        first, last = (count // ops.patch_bytes(self.form.group) for count in columns or (0, self.shape[1]))
        span = first * ops.PATCH_COLUMNS, min(last * ops.PATCH_COLUMNS, self.source.shape[1])
        source = replace(self.source, row_unit=lcm(self.source.row_unit, ops.PATCH_ROWS))
        for row, stretches in source.stretches(start * ops.PATCH_ROWS, stop * ops.PATCH_ROWS, span):
            read = [self._read(rows, span) for rows in stretches]
            numbers = [torch.cat(parts) for parts in zip(*read, strict=True)]
            if source.rearrange is not None:
                numbers = [source.rearrange(part) for part in numbers]
            yield row // ops.PATCH_ROWS, ops.pack_int4(*numbers, self.form.group)

    def _read(self, rows: Span, columns: Span) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and zero points, of the last two a number for each row and group."""
        decoder = self.source.decoder
        assert isinstance(decoder, Grouped)
        size = rows[1] - rows[0], -(-(columns[1] - columns[0]) // self.form.group)
        # A scale a row is that of all columns: also where these are fewer than a group.
        scales, zeros = decoder.numbers(rows, columns if decoder.columns else (0, self.form.group), self.form.group)
        assert zeros is not None
        return decoder.codes.read(rows, columns).to(torch.uint8), scales.expand(size), zeros.expand(size)
