"""Experts' weights put into patches while they are read that no part of raylm.models.quantised reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import torch
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.slots import ExpertForm
from raylm.models.checkpoint import MXFP4Tensor, Room, Source
from raylm.models.quantised.matrix import Span
from raylm.models.quantised.patched import numbers_of

_CHUNK_VALUES = 1 << 19
"""Read at a time."""
_NOT_A_NUMBER = 255
"""As the exponent of a scale."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """An expert's weight, with the interface of CheckpointTensor. Pieces are patches, uint8 [rows / 16, bytes]: MXFP4's
    codes as they are stored, of all others numbers rounded to FP8."""

    source: Source
    form: ExpertForm

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
        return lcm(self.source.row_unit, ops.PATCH_ROWS) // ops.PATCH_ROWS

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces. `columns` are bytes, of whole patches."""
        span = numbers_of(self.form, columns, self.source.shape[1])
        step = max(_CHUNK_VALUES // max(1, span[1] - span[0]) // ops.PATCH_ROWS // self.row_unit, 1) * self.row_unit
        for row in range(start, stop, step):
            yield row, self._packed(row * ops.PATCH_ROWS, min(row + step, stop) * ops.PATCH_ROWS, span)

    def _packed(self, start: int, stop: int, columns: Span) -> Tensor:
        if self.form.numbers == "mxfp4":
            assert isinstance(self.source, MXFP4Tensor)
            codes, exponents = self.source.codes(start, stop, columns)
            if bool((exponents == _NOT_A_NUMBER).any()):
                tensor = self.source.scales
                raise ConfigError(f"{tensor.path}: tensor {tensor.name} holds scales that are no finite numbers")
            return ops.pack_mxfp4(codes, exponents)
        return ops.quantise_fp8(torch.cat([piece.float() for _, piece in self.source.pieces(start, stop, columns)]))
