"""Weights put into patches while they are read, as GPUs' kernels take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raylm import ops
from raylm.errors import ConfigError
from raylm.layers.slots import (
    FP8_FORMS,
    FP8_PATCHES,
    FP8_ROWS,
    INT8_ROWS,
    MXFP4_PATCHES,
    MXFP8_PATCHES,
    OrderedForm,
    PatchForm,
)
from raylm.models.quantised.codes import Nibbles, TableNibbles, Values
from raylm.models.quantised.grid import Grid, PlainZeros
from raylm.models.quantised.joined import Grouped, Kept, QuantisedTensor, S
from raylm.models.quantised.matrix import Span
from raylm.models.quantised.scheme import Scheme

if TYPE_CHECKING:
    from raylm.models.checkpoint import Room

_FOUR_BITS, _EIGHT_BITS = 4, 8
_NAN = 0x7F
"""A code of FP8, but for its sign."""
_MIDDLE: dict[ops.Numbers, int] = {"int4": 8, "int8": 128, "int8_rows": 128}
"""What integers with a sign have less than those without one."""
_MOST_HALF = 65504.0
"""The largest float16, which scales and offsets of affine forms are."""
_MANTISSA_BITS, _BIAS = 23, 127
"""Of float32; exponents of the scales of MXFP4 and MXFP8 have the same bias."""


def form_of(scheme: Scheme) -> PatchForm | None:
    """The patches that hold weights which are stored so, whatever the order of their columns; None where none do."""
    if scheme.rounds_rows:
        return INT8_ROWS
    if scheme.numbers == "int":
        if scheme.bits > _EIGHT_BITS:
            return None
        numbers: ops.Numbers = "int4" if scheme.bits <= _FOUR_BITS else "int8"
        return _grouped_form("affine4" if scheme.zero == "added" else numbers, scheme.columns)
    if scheme.zero != "none":
        return None
    if scheme.layout == "nf4":
        return _grouped_form("nf4", scheme.columns)
    if scheme.layout == "nibbles":
        return MXFP4_PATCHES if _is_mx(scheme) else _grouped_form("int8", scheme.columns)
    if scheme.layout != "values" or scheme.bits != _EIGHT_BITS or scheme.two_scales:
        return None
    if _is_mx(scheme):
        return MXFP8_PATCHES
    if scheme.columns % ops.PATCH_COLUMNS:
        return None
    return FP8_PATCHES if scheme.weights_only else FP8_ROWS


def _is_mx(scheme: Scheme) -> bool:
    """Whether scales are those of the OCP's microscaling formats."""
    return scheme.exponents and (scheme.rows, scheme.columns) == (1, MXFP8_PATCHES.group)


def _grouped_form(numbers: ops.Numbers, columns: int) -> PatchForm | None:
    """With the largest group of those that share the scale of so many columns."""
    groups = (group for group in reversed(ops.GROUPS[numbers]) if columns % group == 0)
    return next((PatchForm(numbers, group) for group in groups), None)


def patch_form(tensor: QuantisedTensor, form: PatchForm) -> PatchForm | OrderedForm | None:
    """The patches that hold the weight's numbers, which are `form` by its scheme; None where none do. Which group a
    column is of is read to find out, where it is stored, and zero points that may be any number. Raises ConfigError for
    a group that is not there."""
    groups = tensor.decoder.groups if isinstance(tensor.decoder, Grouped) else None
    if not _holds_numbers(form, tensor):
        return None
    if groups is None:
        return form
    columns = tensor.shape[1]
    # The last group has the rest then, as groups of neighbours do.
    if not bool((groups.sizes(columns)[:-1] == tensor.scheme.columns).all()):
        return None
    order = groups.order(columns)
    return form if order is None else OrderedForm(form, order.to(torch.int32).numpy().tobytes())


def _holds_numbers(form: PatchForm, tensor: QuantisedTensor) -> bool:
    """Whether the form's patches hold the weight's numbers if columns are sorted by their groups."""
    decoder = tensor.decoder
    rows, columns = tensor.shape
    if not isinstance(decoder, Grouped) or rows % ops.PATCH_ROWS:
        return False
    if decoder.columns and columns % form.group:
        return False
    if isinstance(decoder.codes, TableNibbles):
        return decoder.codes.table.tolist() == list(ops.NF4)
    if form.numbers == "affine4":
        return _are_halves(decoder.scales, decoder) and _are_halves(decoder.shifts, decoder)
    most = ops.MOST_ZERO.get(form.numbers)
    if most is None:
        is_stored_so = isinstance(decoder.codes, Nibbles) or tensor.main.encoding.dtype == ops.CODES
        return is_stored_so and decoder.zeros is None
    if isinstance(decoder.zeros, PlainZeros):
        zeros = decoder.zeros.read(*decoder.grid) + _added(decoder, form)
        return bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros <= most)).all())
    return True


def _added(decoder: Grouped, form: PatchForm) -> int:
    """To integers and zero points, so that they have no sign."""
    return _MIDDLE[form.numbers] if isinstance(decoder.codes, Values | Nibbles) else 0


def _are_halves(grid: Grid | None, decoder: Grouped) -> bool:
    """Whether float16 has numbers near these and near what integers of 4 bits make of them."""
    return grid is not None and bool((grid.read(*decoder.grid).abs() <= _MOST_HALF / (1 << _FOUR_BITS)).all())


@dataclass(frozen=True, slots=True)
class InPatches(Kept[S]):
    """A Kept tensor whose pieces are patches, uint8 [rows / 16, bytes]: its rows are rows of patches."""

    @property
    def row_unit(self) -> int:
        return self.read_unit // ops.PATCH_ROWS

    @property
    def read_unit(self) -> int:
        """Rows of the source that are read together."""
        return lcm(self.source.row_unit, ops.PATCH_ROWS)


@dataclass(frozen=True, slots=True)
class PatchedTensor(InPatches[QuantisedTensor]):
    """A QuantisedTensor whose `patch_form` is `form`, or an OrderedForm of it: columns are sorted then."""

    form: PatchForm

    def pieces(
        self, start: int, stop: int, columns: tuple[int, int] | None = None, room: Room | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """As CheckpointTensor.pieces. `columns` are bytes, of whole patches."""
        span = numbers_of(self.form, columns, self.source.shape[1])
        source = replace(self.source, row_unit=self.read_unit)
        order = self._order()
        for row, stretches in source.stretches(start * ops.PATCH_ROWS, stop * ops.PATCH_ROWS, span):
            read = [self._read(rows, span, order) for rows in stretches]
            numbers = [torch.cat(parts) for parts in zip(*read, strict=True)]
            if source.rearrange is not None:
                numbers = [source.rearrange(part) for part in numbers]
            yield row // ops.PATCH_ROWS, self._pack(numbers)

    def _order(self) -> Tensor | None:
        decoder = self.source.decoder
        assert isinstance(decoder, Grouped)
        return None if decoder.groups is None else decoder.groups.order(decoder.shape[1])

    def _read(self, rows: Span, columns: Span, order: Tensor | None) -> list[Tensor]:
        """Codes, scales and, of integers, zero points or, of affine forms, offsets: all but codes a number for each row
        and group."""
        decoder = self.source.decoder
        assert isinstance(decoder, Grouped)
        size = rows[1] - rows[0], -(-(columns[1] - columns[0]) // self.form.group)
        # A scale a row is that of all columns: also where these are fewer than a group.
        of_groups = columns if decoder.columns else (0, self.form.group)
        scales, zeros, shifts = decoder.numbers(rows, of_groups, self.form.group)
        if self.form == MXFP4_PATCHES or isinstance(decoder.codes, TableNibbles):
            assert isinstance(decoder.codes, Nibbles | TableNibbles)
            return [decoder.codes.bits(rows, columns), scales.expand(size)]
        if order is None:
            codes = decoder.codes.read(rows, columns)
        else:
            codes = decoder.codes.read(rows, (0, len(order)))[:, order[slice(*columns)]]
        if self.form in (*FP8_FORMS, MXFP8_PATCHES):
            return [codes, scales.expand(size)]
        zeros = torch.zeros(1, 1) if zeros is None else zeros
        if shifts is not None:
            return [codes, scales.expand(size), (shifts - zeros * scales).expand(size)]
        added = _added(decoder, self.form)
        if isinstance(decoder.codes, Nibbles):
            codes, scales = codes * 2, scales / 2  # floats of 4 bits are halves of integers
        codes = (codes.to(torch.int16) + added).to(torch.uint8)
        return [codes, scales.expand(size), zeros.expand(size) + added]

    def _pack(self, numbers: list[Tensor]) -> Tensor:
        where = f"{self.path}: tensor {self.source.main.name}"
        codes, scales, *_ = numbers
        if self.form in (*FP8_FORMS, MXFP8_PATCHES) and bool((codes.view(torch.uint8) & _NAN == _NAN).any()):
            raise ConfigError(f"{where} holds codes that are no numbers")
        if self.form in FP8_FORMS:
            if bool((scales > ops.MOST_SCALE).any()):
                raise ConfigError(f"{where} has scales above {ops.MOST_SCALE:g}, the largest that kernels take")
            return ops.pack_fp8(codes, scales)
        if self.form in (MXFP4_PATCHES, MXFP8_PATCHES):
            # Powers of two: nothing but an exponent.
            exponents = (scales.contiguous().view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
            check_exponents(exponents, where)
            pack = ops.pack_mxfp4 if self.form == MXFP4_PATCHES else ops.pack_mxfp8
            return pack(codes, exponents)
        if self.form.numbers == "nf4":
            return ops.pack_nf4(codes, scales, self.form.group)
        if self.form.numbers == "affine4":
            return ops.pack_affine(self.form.numbers, *numbers, self.form.group)
        scheme = self.source.scheme
        if scheme.layout == "values" and bool((codes > ops.MOST_CODE[self.form.numbers]).any()):
            raise ConfigError(f"{where} holds integers of more than {scheme.bits} bits")
        return ops.pack_integers(self.form.numbers, *numbers, self.form.group)


def check_exponents(exponents: Tensor, where: str) -> None:
    """Raises ConfigError for exponents of MX formats' scales that kernels do not take; `where` names the tensor."""
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
    return first * ops.PATCH_COLUMNS, min(last * ops.PATCH_COLUMNS, size)
