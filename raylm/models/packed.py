"""Experts' weights put into patches while they are read that no part of raylm.models.quantised reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.slots import FP8_PATCHES, MXFP4_PATCHES, PatchForm
from raylm.models.checkpoint import MXFP4Tensor, Room, Source
from raylm.models.quantised.matrix import Span
from raylm.models.quantised.patched import InPatches, check_exponents, numbers_of

_CHUNK_VALUES = 1 << 19
"""Read at a time."""


@dataclass(frozen=True, slots=True)
class PackedTensor(InPatches[Source]):
    """An expert's weight, with the interface of CheckpointTensor: GPT-OSS's codes as they are stored, of all others
    numbers rounded to FP8."""

    form: PatchForm

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces. `columns` are bytes, of whole patches."""
        span = numbers_of(self.form, columns, self.source.shape[1])
        step = max(_CHUNK_VALUES // max(1, span[1] - span[0]) // ops.PATCH_ROWS // self.row_unit, 1) * self.row_unit
        for row in range(start, stop, step):
            yield row, self._packed(row * ops.PATCH_ROWS, min(row + step, stop) * ops.PATCH_ROWS, span)

    def _packed(self, start: int, stop: int, columns: Span) -> Tensor:
        source = self.source
        if self.form == FP8_PATCHES:
            numbers = torch.cat([piece.float() for _, piece in source.pieces(start, stop, columns)])
            if not bool(numbers.isfinite().all()):
                raise ConfigError(f"{source.path}: tensor {source.name} holds numbers that are not finite")
            return ops.quantise_fp8(numbers)
        if self.form != MXFP4_PATCHES or not isinstance(source, MXFP4Tensor):
            raise ConfigError(f"{source.path}: tensor {source.name} is not stored as {self.form}, as other experts are")
        codes, exponents = source.codes(start, stop, columns)
        check_exponents(exponents, f"{source.path}: tensor {source.scales.name}")
        return ops.pack_mxfp4(codes, exponents)
