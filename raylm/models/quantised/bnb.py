"""bitsandbytes' 4 bits: values in blocks along the rows, one behind the other, whose largest values may be quantised
themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raylm.models.quantised.grid import check
from raylm.models.quantised.matrix import Span, read

if TYPE_CHECKING:
    from raylm.models.checkpoint import CheckpointTensor
    from raylm.models.quantised.joined import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedScales:
    """Scales [R, C] that are quantised to a byte each: table[code] * largest + offset, where `block` of them, counted
    along the rows, share `largest`."""

    codes: CheckpointTensor
    largest: CheckpointTensor
    table: Tensor
    block: int
    offset: float

    def read(self, rows: Span, columns: Span) -> Tensor:
        """Raises ConfigError for scales that are no numbers, or negative."""
        codes = read(self.codes, rows, columns).long()
        width = self.codes.shape[1]
        place = (torch.arange(*rows).unsqueeze(1) * width + torch.arange(*columns)) // self.block
        first = int(place.min())
        largest = read(self.largest, (0, 1), (first, int(place.max()) + 1)).float()[0]
        check(self.largest, largest, signed=False)
        values = self.table[codes] * largest[place - first] + self.offset
        check(self.codes, values, signed=False)
        return values


@dataclass(frozen=True, slots=True)
class Rows:
    """A weight [N, K] of which `decoder` has all values in one row [1, N * K], because blocks go over the ends of rows.
    Rows are decoded whole."""

    decoder: Decoder
    shape: tuple[int, int]
    least_rows = 1

    def decode(self, rows: Span, columns: Span) -> Tensor:
        width = self.shape[1]
        values = self.decoder.decode((0, 1), (rows[0] * width, rows[1] * width))
        return values.view(-1, width)[:, columns[0] : columns[1]]
