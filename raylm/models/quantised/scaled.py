"""Weights of 8-bit floats with one scale a row, or one in all, read as they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.models.quantised.grid import Scales
from raylm.models.quantised.joined import Grouped, Kept, QuantisedTensor
from raylm.models.quantised.matrix import Span

if TYPE_CHECKING:
    from raylm.models.checkpoint import Room

_CHUNK_VALUES = 1 << 22
"""Read at a time: as nothing is computed with codes, larger pieces than those that are decoded."""


def is_scaled(tensor: QuantisedTensor) -> bool:
    """Whether the weight is codes of ops.CODES, each row of which has one scale."""
    return tensor.scheme.scales_rows and tensor.main.encoding.dtype == ops.CODES


@dataclass(frozen=True, slots=True)
class ScaledTensor(Kept[QuantisedTensor]):
    """A QuantisedTensor that `is_scaled`: pieces are codes and scales as the file has them. A scale of the whole weight
    is repeated for each row."""

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, ops.ScaledRows]]:
        """As CheckpointTensor.pieces. Raises ConfigError for scales that are not numbers above 0."""
        columns = columns or (0, self.shape[1])
        for row, stretches in self.source.stretches(start, stop, columns, _CHUNK_VALUES):
            read = [self._read(rows, columns) for rows in stretches]
            codes, scales = (torch.cat(parts) for parts in zip(*read, strict=True))
            if (rearrange := self.source.rearrange) is not None:
                codes, scales = rearrange(codes), rearrange(scales)
            yield row, ops.ScaledRows(codes, scales)

    def _read(self, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
        decoder = self.source.decoder
        assert isinstance(decoder, Grouped) and isinstance(decoder.scales, Scales)
        scales = decoder.scales.read(rows if decoder.rows else (0, 1), (0, 1)).flatten()
        if not bool((scales > 0).all()):
            tensor = decoder.scales.tensor
            raise ConfigError(f"{tensor.path}: tensor {tensor.name} holds scales of 0; allowed: numbers above 0")
        return decoder.codes.read(rows, columns), scales.expand(rows[1] - rows[0])
