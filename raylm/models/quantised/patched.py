"""Weights put into patches while they are read, as GPUs' kernels take them: integers of 4 bits or fewer in groups, and
experts' floats of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.slots import FP8_EXPERTS, MXFP4_EXPERTS, ExpertForm, Int4Form, PatchForm
from raylm.models.quantised.codes import Nibbles
from raylm.models.quantised.grid import PlainZeros
from raylm.models.quantised.joined import Grouped, Kept, QuantisedTensor
from raylm.models.quantised.matrix import Span
from raylm.models.quantised.scheme import Scheme

if TYPE_CHECKING:
    from raylm.models.checkpoint import Room

_BITS = 4
_LAYOUTS = ("packed", "gptq", "awq")
_FP8_BITS = 8
_NAN = 0x7F
"""A code of FP8, but for its sign."""
_MANTISSA_BITS, _BIAS = 23, 127
"""Of float32; exponents of MXFP4's scales have the same bias."""


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


def expert_form_of(scheme: Scheme) -> ExpertForm | None:
    """The same of experts' weights."""
    if (integers := form_of(scheme)) is not None:
        return ExpertForm("int4", integers.group)
    if scheme.numbers != "float" or scheme.two_scales or scheme.zero != "none":
        return None
    if scheme.layout == "nibbles" and scheme.exponents and (scheme.rows, scheme.columns) == (1, MXFP4_EXPERTS.group):
        return MXFP4_EXPERTS
    is_fp8 = scheme.layout == "values" and scheme.bits == _FP8_BITS and scheme.columns % FP8_EXPERTS.columns == 0
    return FP8_EXPERTS if is_fp8 else None


def expert_form(tensor: QuantisedTensor) -> ExpertForm | None:
    """The same of an expert's weight."""
    if (integers := int4_form(tensor)) is not None:
        return ExpertForm("int4", integers.group)
    form, decoder = expert_form_of(tensor.scheme), tensor.decoder
    rows, columns = tensor.shape
    if form is None or rows % ops.PATCH_ROWS or (tensor.scheme.columns and columns % form.group):
        return None
    if not isinstance(decoder, Grouped) or decoder.zeros is not None:
        return None
    is_stored_so = isinstance(decoder.codes, Nibbles) or tensor.main.encoding.dtype == ops.CODES
    return form if is_stored_so else None


@dataclass(frozen=True, slots=True)
class PatchedTensor(Kept[QuantisedTensor]):
    """A QuantisedTensor whose `int4_form` or `expert_form` is `form`. Pieces are patches, uint8 [rows / 16, bytes]."""

    form: PatchForm

    @property
    def row_unit(self) -> int:
        return lcm(self.source.row_unit, ops.PATCH_ROWS) // ops.PATCH_ROWS

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces. `columns` are bytes, of whole patches."""
        span = numbers_of(self.form, columns, self.source.shape[1])
        source = replace(self.source, row_unit=lcm(self.source.row_unit, ops.PATCH_ROWS))
        for row, stretches in source.stretches(start * ops.PATCH_ROWS, stop * ops.PATCH_ROWS, span):
            read = [self._read(rows, span) for rows in stretches]
            numbers = [torch.cat(parts) for parts in zip(*read, strict=True)]
            if source.rearrange is not None:
                numbers = [source.rearrange(part) for part in numbers]
            yield row // ops.PATCH_ROWS, self._pack(numbers)

    def _read(self, rows: Span, columns: Span) -> list[Tensor]:
        """Codes, scales and, of integers, zero points: of the last two a number for each row and group."""
        decoder = self.source.decoder
        assert isinstance(decoder, Grouped)
        size = rows[1] - rows[0], -(-(columns[1] - columns[0]) // self.form.group)
        # A scale a row is that of all columns: also where these are fewer than a group.
        scales, zeros = decoder.numbers(rows, columns if decoder.columns else (0, self.form.group), self.form.group)
        if isinstance(decoder.codes, Nibbles):
            return [decoder.codes.bits(rows, columns), scales.expand(size)]
        codes = decoder.codes.read(rows, columns)
        if zeros is None:
            return [codes, scales.expand(size)]
        return [codes.to(torch.uint8), scales.expand(size), zeros.expand(size)]

    def _pack(self, numbers: list[Tensor]) -> Tensor:
        where = f"{self.path}: tensor {self.source.main.name}"
        codes, scales, *_ = numbers
        if self.form == FP8_EXPERTS:
            if bool((codes.view(torch.uint8) & _NAN == _NAN).any()):
                raise ConfigError(f"{where} holds codes that are no numbers")
            return ops.pack_fp8(codes, scales)
        if self.form == MXFP4_EXPERTS:
            # Powers of two: nothing but an exponent.
            exponents = (scales.contiguous().view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
            check_exponents(exponents, where)
            return ops.pack_mxfp4(codes, exponents)
        return ops.pack_int4(*numbers, self.form.group, self.form.columns)


def check_exponents(exponents: Tensor, where: str) -> None:
    """Raises ConfigError for exponents of MXFP4's scales that kernels do not take; `where` names the tensor."""
    if bool((exponents > ops.MOST_EXPONENT).any()):
        raise ConfigError(
            f"{where} holds scales that are no finite numbers, or above 2 ** {ops.MOST_EXPONENT - _BIAS}, the largest "
            "that kernels take"
        )


def numbers_of(form: PatchForm, columns: Span | None, size: int) -> Span:
    """Columns in bytes of patches, or all of a matrix of `size` columns, as columns of numbers."""
    if columns is None:
        return 0, size
    first, last = (count // form.patch_bytes for count in columns)
    return first * form.columns, min(last * form.columns, size)
