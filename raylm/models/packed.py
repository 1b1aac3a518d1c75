"""Experts' weights put into patches or blocks while they are read that no part of raylm.models.quantised reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import torch
from gguf import GGMLQuantizationType as GGMLType
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.slots import FP8_FORMS, MXFP4_PATCHES, BlockForm, PatchForm
from raylm.models.checkpoint import MXFP4Tensor, Room, Source
from raylm.models.mxfp4 import VALUES
from raylm.models.quantised.joined import Kept
from raylm.models.quantised.matrix import Span
from raylm.models.quantised.patched import InPatches, check_exponents, numbers_of

_CHUNK_VALUES = 1 << 19
"""Read at a time."""
MXFP4_BLOCKS = BlockForm(GGMLType.MXFP4.value, GGMLType.MXFP4.name, *gguf.GGML_QUANT_SIZES[GGMLType.MXFP4])
"""Values of GGML's type are twice those of MXFP4 and its scales half of them, so codes and exponents are the same."""


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
        if self.form in FP8_FORMS:
            numbers = torch.cat([piece.float() for _, piece in source.pieces(start, stop, columns)])
            if not bool(numbers.isfinite().all()):
                raise ConfigError(f"{source.path}: tensor {source.name} holds numbers that are not finite")
            return ops.quantise_fp8(numbers)
        if self.form != MXFP4_PATCHES or not isinstance(source, MXFP4Tensor):
            raise ConfigError(f"{source.path}: tensor {source.name} is not stored as {self.form}, as other experts are")
        codes, exponents = source.codes(start, stop, columns)
        check_exponents(exponents, f"{source.path}: tensor {source.scales.name}")
        return ops.pack_mxfp4(codes, exponents)


@dataclass(frozen=True, slots=True)
class MXFP4InBlocks(Kept[MXFP4Tensor]):
    """GPT-OSS's codes in MXFP4_BLOCKS: uint8 [N, bytes of a row]."""

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.source.shape
        return rows, columns // VALUES * MXFP4_BLOCKS.num_bytes

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces. `columns` are bytes, of whole blocks."""
        first, last = columns or (0, self.shape[1])
        span = first // MXFP4_BLOCKS.num_bytes * VALUES, last // MXFP4_BLOCKS.num_bytes * VALUES
        step = max(_CHUNK_VALUES // max(1, span[1] - span[0]), 1)
        for row in range(start, stop, step):
            codes, exponents = self.source.codes(row, min(row + step, stop), span)
            check_exponents(exponents, f"{self.path}: tensor {self.source.scales.name}")
            low, high = codes.unflatten(1, (-1, 2, VALUES // 2)).unbind(2)
            yield row, torch.cat((exponents.unsqueeze(-1), low | high << 4), dim=-1).flatten(1)
