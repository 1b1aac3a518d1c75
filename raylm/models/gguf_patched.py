"""A GGUF file's matrices put into patches while they are read, as GPUs' kernels take them.

Layout of the blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType
from gguf.quants import IQ4_NL
from torch import Tensor

from raylm import ops
from raylm.layers.slots import MXFP4_PATCHES, BlockForm, PatchForm
from raylm.models.checkpoint import CheckpointTensor, Room
from raylm.models.quantised.patched import InPatches, check_exponents, numbers_of

_BYTE = 8
"""Bits."""
_HALF = 2
"""Bytes of a float16."""
_MIDDLE = 128
"""The code of 0, of integers of 8 bits with a sign."""
_IQ4_CODES = (np.array(IQ4_NL.kvalues) + _MIDDLE).astype(np.uint8)
"""What the codes of IQ4_NL and IQ4_XS stand for, and the middle."""


class _Type(NamedTuple):
    """A type of blocks. `read` turns blocks, uint8 [B, bytes], into codes, uint8 [B, values], and for each group of
    values a scale, of MXFP4 its exponent, and of affine forms an offset: [B, groups]."""

    form: PatchForm
    read: Callable[[Tensor], tuple[Tensor, ...]]
    zero: int = 0
    """Of integers: the code of 0."""


@dataclass(frozen=True, slots=True)
class BlocksInPatches(InPatches[CheckpointTensor]):
    """A matrix in blocks that `patches_of` has a form for, with the interface of CheckpointTensor."""

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces. `columns` are bytes, of whole patches."""
        blocks = self.source.encoding.form
        assert blocks is not None
        kind = _TYPES[GGMLType(blocks.kind)]
        first, last = numbers_of(kind.form, columns, self.source.shape[1])
        # Patches may begin within a block of 256 numbers.
        before, behind = first // blocks.values, -(-last // blocks.values)
        stored = replace(self.source.in_blocks(), row_unit=self.read_unit)
        read = stored.pieces(
            start * ops.PATCH_ROWS, stop * ops.PATCH_ROWS, (before * blocks.num_bytes, behind * blocks.num_bytes)
        )
        first, last = first - before * blocks.values, last - before * blocks.values
        groups = slice(first // kind.form.group, -(-last // kind.form.group))
        for row, piece in read:
            parts = kind.read(piece.reshape(-1, blocks.num_bytes).contiguous())
            codes, scales, *offsets = (part.reshape(len(piece), -1) for part in parts)
            offset = offsets[0][:, groups] if offsets else None
            yield row // ops.PATCH_ROWS, self._pack(kind, codes[:, first:last], scales[:, groups], offset)

    def _pack(self, kind: _Type, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
        numbers, group = kind.form
        if kind.form == MXFP4_PATCHES:
            check_exponents(scales, f"{self.path}: tensor {self.name}")
            return ops.pack_mxfp4(codes, scales)
        if offsets is None:
            return ops.pack_integers(numbers, codes, scales, torch.full_like(scales, kind.zero), group)
        return ops.pack_affine(numbers, codes, scales, offsets, group)


def patches_of(blocks: BlockForm | None) -> PatchForm | None:
    """The patches that hold the numbers of such blocks; None where none do."""
    kind = _TYPES.get(GGMLType(blocks.kind)) if blocks is not None else None
    return None if kind is None else kind.form


def _fields(stored: Tensor, bits: int, run: int) -> Tensor:
    """Fields of `bits` bits of bytes [B, n], uint8 [B, n * 8 / bits]: of each `run` bytes first the lowest fields of
    all, then the next ones."""
    shifts = torch.arange(0, _BYTE, bits, dtype=torch.uint8).unsqueeze(-1)
    return (stored.unflatten(1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(1)


def _floats(blocks: Tensor, place: int) -> Tensor:
    """The float16 at that byte of each block: float32 [B, 1]."""
    return blocks[:, place : place + _HALF].contiguous().view(torch.float16).float()


def _q4_0(blocks: Tensor) -> tuple[Tensor, ...]:
    return _fields(blocks[:, 2:], 4, 16), _floats(blocks, 0)


def _q4_1(blocks: Tensor) -> tuple[Tensor, ...]:
    return _fields(blocks[:, 4:], 4, 16), _floats(blocks, 0), _floats(blocks, 2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, ...]:
    return _fields(blocks[:, 6:], 4, 16) | _fields(blocks[:, 2:6], 1, 1) << 4, _floats(blocks, 0)


def _q5_1(blocks: Tensor) -> tuple[Tensor, ...]:
    codes = _fields(blocks[:, 8:], 4, 16) | _fields(blocks[:, 4:8], 1, 1) << 4
    return codes, _floats(blocks, 0), _floats(blocks, 2)


def _q8_0(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 2:] ^ _MIDDLE, _floats(blocks, 0)  # without their sign


def _q2_k(blocks: Tensor) -> tuple[Tensor, ...]:
    scales = blocks[:, :16]
    codes = _fields(blocks[:, 16:80], 2, 32)
    return codes, _floats(blocks, 80) * (scales & 0xF), -(_floats(blocks, 82) * (scales >> 4))


def _q3_k(blocks: Tensor) -> tuple[Tensor, ...]:
    codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    return codes, _floats(blocks, 108) * (scales.float() - 32)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: [B, 8] each. The offset is the minimum's negative."""
    low, minima, high = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((low & 0x3F, high & 0xF | low >> 2 & 0x30), dim=1)
    minima = torch.cat((minima & 0x3F, high >> 4 | minima >> 2 & 0x30), dim=1)
    return _floats(blocks, 0) * scales, -(_floats(blocks, 2) * minima)


def _q4_k(blocks: Tensor) -> tuple[Tensor, ...]:
    return _fields(blocks[:, 16:], 4, 32), *_scales_and_minima(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, ...]:
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return codes, *_scales_and_minima(blocks)


def _q6_k(blocks: Tensor) -> tuple[Tensor, ...]:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return codes, _floats(blocks, 208) * blocks[:, 192:208].view(torch.int8)


def _iq4(stored: Tensor) -> Tensor:
    return torch.from_numpy(_IQ4_CODES[_fields(stored, 4, 16).numpy()])


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, ...]:
    return _iq4(blocks[:, 2:]), _floats(blocks, 0)


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, ...]:
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    return _iq4(blocks[:, 8:]), _floats(blocks, 0) * (scales.float() - 32)


def _mxfp4(blocks: Tensor) -> tuple[Tensor, ...]:
    # The format has twice the values and half the scale of OCP's, so exponents are the same.
    return _fields(blocks[:, 1:], 4, 16), blocks[:, :1]


_TYPES = {
    GGMLType.Q4_0: _Type(PatchForm("int4", 32), _q4_0, zero=8),
    GGMLType.Q4_1: _Type(PatchForm("affine4", 32), _q4_1),
    GGMLType.Q5_0: _Type(PatchForm("int8", 32), _q5_0, zero=16),
    GGMLType.Q5_1: _Type(PatchForm("affine8", 32), _q5_1),
    GGMLType.Q8_0: _Type(PatchForm("int8", 32), _q8_0, zero=_MIDDLE),
    GGMLType.Q2_K: _Type(PatchForm("affine4", 16), _q2_k),
    GGMLType.Q3_K: _Type(PatchForm("int8", 16), _q3_k, zero=4),
    GGMLType.Q4_K: _Type(PatchForm("affine4", 32), _q4_k),
    GGMLType.Q5_K: _Type(PatchForm("affine8", 32), _q5_k),
    GGMLType.Q6_K: _Type(PatchForm("int8", 16), _q6_k, zero=32),
    GGMLType.IQ4_NL: _Type(PatchForm("int8", 32), _iq4_nl, zero=_MIDDLE),
    GGMLType.IQ4_XS: _Type(PatchForm("int8", 32), _iq4_xs, zero=_MIDDLE),
    GGMLType.MXFP4: _Type(MXFP4_PATCHES, _mxfp4),
}
"""Affine forms round scale and offset to float16, which changes none of Q4_1's and Q5_1's; integers keep 16 bits of a
scale's mantissa, which are all of them but Q6_K's."""
