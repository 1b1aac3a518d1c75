"""The matrix of a linear layer: how this rank's part of it is stored, filled and multiplied by.

A layer describes the matrix by its parts, one for each tensor of a checkpoint that fills it. Layers never look at how a
matrix is stored: they call `matmul`, `gated_matmul` and `rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm import ops
from raylm.layers.halves import in_halves_of_rows
from raylm.layers.slots import BlockForm, OrderedForm, PatchForm, Slot, SlotName, empty_parameter, row_bytes

Form = BlockForm | PatchForm | OrderedForm | torch.dtype
Forms = Mapping[str | None, Form]
"""How a matrix is kept: each shard's form, or under None that of all. Without one it has the layer's dtype. ops.CODES
stands for codes of 8 bits with a scale a row (ScaledWeight)."""
PLAIN: Forms = {}
_HALF = 2
"""Bytes of a number of 16 bits: GPUs' kernels for codes give such numbers alone."""


class Part(NamedTuple):
    """`share` of the `size` rows of one tensor of a checkpoint, from row `start` on. `padding` rows of zeros follow."""

    shard: str | None
    size: int
    share: int
    start: int
    padding: int = 0


class Columns(NamedTuple):
    """`share` of a matrix's `size` columns, from column `start` on."""

    size: int
    share: int
    start: int

    @classmethod
    def whole(cls, size: int) -> Columns:
        return cls(size, size, 0)

    @property
    def cuts_patches(self) -> bool:
        """Whether the part begins or ends within a patch of the whole matrix."""
        last = self.start + self.share
        return self.start % ops.PATCH_COLUMNS != 0 or (last < self.size and last % ops.PATCH_COLUMNS != 0)

    def in_blocks(self, form: BlockForm) -> Columns | None:
        """The same columns counted in bytes; None where they begin or end within a block."""
        if any(count % form.values for count in self):
            return None
        return Columns(*(count // form.values * form.num_bytes for count in self))

    def in_patches(self, form: PatchForm) -> Columns | None:
        """The same columns counted in bytes of rows of patches, the last of which may be filled up; None where the part
        begins or ends within a patch, or is no multiple of what kernels take."""
        if self.cuts_patches or self.share % ops.PATCHED_UNIT:
            return None
        return Columns(*(row_bytes(form, count) for count in self))


def column_unit(form: Form | None) -> int:
    """The number of columns that must not be split between two ranks if a matrix is to be kept in this form; 1 where
    every number stands alone."""
    match form:
        case BlockForm(values=values):
            return values
        case PatchForm():
            return ops.PATCH_COLUMNS
    return 1


class PlainWeight(nn.Module):
    """One tensor [rows, columns] of floating-point numbers."""

    takes_scaled_rows = False

    def __init__(
        self,
        parts: Sequence[Part],
        columns: Columns,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kept_as: torch.dtype | None = None,
    ) -> None:
        """`dtype`: of activations, and of the matrix where it is not `kept_as` another one."""
        super().__init__()
        self._parts, self._columns, self._dtype = parts, columns, dtype
        num_rows = sum(part.share + part.padding for part in parts)
        self.values = empty_parameter(num_rows, columns.share, dtype=kept_as or dtype, device=device)
        if parts[-1].padding:
            self.values[num_rows - parts[-1].padding :] = 0

    @property
    def plain(self) -> Tensor | None:
        """The matrix as one tensor, for kernels that read it directly."""
        return self.values

    @property
    def stored(self) -> tuple[list[Tensor], list[int]]:
        """Tensors and kinds, as ops.StoredLayers has them."""
        return [self.values], [ops.PLAIN]

    def matmul(self, x: ops.Rows, bias: Tensor | None = None) -> Tensor:
        """x [T, columns] times the transpose, plus the bias: [T, rows]. Only a weight that `takes_scaled_rows` takes
        ScaledRows."""
        assert isinstance(x, Tensor)
        if bias is None and (product := in_halves_of_rows(x, self.values)) is not None:
            return product
        return ops.linear(x, self.values, bias, frozen=True)

    def gated_matmul(
        self,
        x: ops.Rows,
        activation: Literal["silu", "gelu_tanh"],
        bias: Tensor | None = None,
        *,
        scales: bool = False,
    ) -> ops.Rows:
        """act(first half of matmul) * second half: [T, rows / 2], as ScaledRows with `scales`."""
        assert isinstance(x, Tensor)
        gated = ops.gated_linear(x, self.values, activation, bias, frozen=True)
        return _rows(gated, scales)

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows by their numbers, int64 [T]: [T, columns]."""
        return F.embedding(numbers, self.values).to(self._dtype)

    def named_slots(self, name: str) -> dict[SlotName, Slot]:
        """What fills the matrix, which the layer calls `name`."""
        slots: dict[SlotName, Slot] = {}
        row = 0
        for part in self._parts:
            slots[name, part.shard] = _slot(self.values[row : row + part.share], part, self._columns)
            row += part.share
        return slots


class InvariantWeight(PlainWeight):
    """A PlainWeight whose products give a row the same bits, however many rows there are (runtime.deterministic)."""

    @property
    def plain(self) -> Tensor | None:
        """None: kernels that read the matrix directly sum in an order of their own."""
        return None

    def matmul(self, x: ops.Rows, bias: Tensor | None = None) -> Tensor:
        """As PlainWeight.matmul."""
        assert isinstance(x, Tensor)
        return ops.invariant_linear(x, self.values, bias, frozen=True)

    def gated_matmul(
        self,
        x: ops.Rows,
        activation: Literal["silu", "gelu_tanh"],
        bias: Tensor | None = None,
        *,
        scales: bool = False,
    ) -> ops.Rows:
        """As PlainWeight.gated_matmul."""
        return _rows(_gated(self.matmul(x, bias), activation), scales)


class BlockWeight(nn.Module):
    """A matrix in a GGUF file's own blocks, a tensor for each part: parts may be of different forms.

    Products are computed from the blocks, with activations quantised to 16 bits (raylm.ops.block_linear).
    """

    plain = None
    takes_scaled_rows = False

    def __init__(
        self,
        parts: Sequence[Part],
        columns: Columns,
        forms: Sequence[BlockForm],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype`: of what `rows` returns."""
        super().__init__()
        self.forms = tuple(forms)
        self._parts, self._dtype = parts, dtype
        self._columns: list[Columns] = []
        self._tensors: list[Tensor] = []
        for part, form in zip(parts, forms, strict=True):
            in_bytes = columns.in_blocks(form)
            assert in_bytes is not None
            num_rows = part.share + part.padding
            blocks = empty_parameter(num_rows, in_bytes.share, dtype=torch.uint8, device=device)
            blocks[part.share :] = 0  # blocks of zeros hold zeros, in every form
            self._tensors.append(blocks)
            self._columns.append(in_bytes)
        self.blocks = nn.ParameterList(self._tensors)
        self._kinds = [form.kind for form in forms]

    @property
    def stored(self) -> tuple[list[Tensor], list[int]]:
        """As PlainWeight.stored."""
        return self._tensors, self._kinds

    def matmul(self, x: ops.Rows, bias: Tensor | None = None) -> Tensor:
        """As PlainWeight.matmul."""
        assert isinstance(x, Tensor)
        return ops.block_linear(x, self._tensors, self._kinds, bias)

    def gated_matmul(
        self,
        x: ops.Rows,
        activation: Literal["silu", "gelu_tanh"],
        bias: Tensor | None = None,
        *,
        scales: bool = False,
    ) -> ops.Rows:
        """As PlainWeight.gated_matmul, of two parts."""
        assert isinstance(x, Tensor)
        gated = ops.block_gated_linear(x, self._tensors, self._kinds, activation, bias)
        return _rows(gated, scales)

    def rows(self, numbers: Tensor) -> Tensor:
        """As PlainWeight.rows, of one part."""
        return ops.decode_blocks(self._tensors[0].index_select(0, numbers), self._kinds[0]).to(self._dtype)

    def named_slots(self, name: str) -> dict[SlotName, Slot]:
        """As PlainWeight.named_slots; shapes count bytes."""
        stored = zip(self._parts, self._columns, self.forms, self._tensors, strict=True)
        return {
            (name, part.shard): _slot(blocks[: part.share], part, columns, form)
            for part, columns, form, blocks in stored
        }


class ScaledWeight(nn.Module):
    """A matrix of 8-bit floating-point codes (FP8) with one scale a row, which is over this rank's columns alone where
    ranks split columns.

    Activations are quantised to FP8 too, each row by itself: behind a norm or a gated activation where one stands in
    front, else in `matmul`.
    """

    plain = None
    takes_scaled_rows = True

    def __init__(self, parts: Sequence[Part], columns: Columns, *, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: of results."""
        super().__init__()
        self._parts, self._columns, self._dtype = parts, columns, dtype
        num_rows = sum(part.share + part.padding for part in parts)
        self.codes = empty_parameter(num_rows, columns.share, dtype=ops.CODES, device=device)
        self.scales = empty_parameter(num_rows, dtype=torch.float32, device=device)
        if padding := parts[-1].padding:
            self.codes[num_rows - padding :] = 0
            self.scales[num_rows - padding :] = 1

    def matmul(self, x: ops.Rows, bias: Tensor | None = None) -> Tensor:
        """As PlainWeight.matmul."""
        rows = x if isinstance(x, ops.ScaledRows) else ops.scale_rows(x)
        return ops.scaled_linear(rows, self.codes, self.scales, bias, dtype=self._dtype, frozen=True)

    def gated_matmul(
        self,
        x: ops.Rows,
        activation: Literal["silu", "gelu_tanh"],
        bias: Tensor | None = None,
        *,
        scales: bool = False,
    ) -> ops.Rows:
        """As PlainWeight.gated_matmul."""
        rows = x if isinstance(x, ops.ScaledRows) else ops.scale_rows(x)
        if scales:
            return ops.scaled_gated_linear(
                rows, self.codes, self.scales, activation, bias, dtype=self._dtype, frozen=True
            )
        return _gated(self.matmul(rows, bias), activation)

    def rows(self, numbers: Tensor) -> Tensor:
        """As PlainWeight.rows."""
        scales = self.scales.index_select(0, numbers).unsqueeze(-1)
        return (self.codes.index_select(0, numbers).float() * scales).to(self._dtype)

    def named_slots(self, name: str) -> dict[SlotName, Slot]:
        """As PlainWeight.named_slots."""
        slots: dict[SlotName, Slot] = {}
        row = 0
        for part in self._parts:
            rows = slice(row, row + part.share)
            slots[name, part.shard] = _slot(self.codes[rows], part, self._columns, scales=self.scales[rows])
            row += part.share
        return slots


class PatchedWeight(nn.Module):
    """A matrix of codes with scales, in patches; activations have 16 bits, or are rounded to 8 where the form says so.

    Patches of an OrderedForm hold the columns in another `order`, int32 [columns]; a product permutes the activations
    first. Other forms have no `order`. It comes with the form, no slot fills it.
    """

    plain = None
    takes_scaled_rows = False

    def __init__(
        self,
        parts: Sequence[Part],
        columns: Columns,
        kept_as: PatchForm | OrderedForm,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype`: of what `rows` returns. An OrderedForm wants all columns."""
        super().__init__()
        self.kept_as = kept_as
        self.order: Tensor | None = None
        form = kept_as
        if isinstance(form, OrderedForm):
            self.order, form = form.places(columns.share, device), form.patches
        in_patches = columns.in_patches(form)
        assert in_patches is not None and _can_be_patches(parts)
        self._parts, self._columns, self._in_patches = parts, columns, in_patches
        self.form, self._dtype = form, dtype
        num_rows = sum(part.share for part in parts)
        self.num_values = num_rows * columns.share
        self.patches = empty_parameter(num_rows // ops.PATCH_ROWS, in_patches.share, dtype=torch.uint8, device=device)

    def matmul(self, x: ops.Rows, bias: Tensor | None = None) -> Tensor:
        """As PlainWeight.matmul."""
        assert isinstance(x, Tensor)
        numbers, group = self.form
        return ops.patched_linear(self._ordered(x), self.patches, bias, numbers=numbers, group=group, frozen=True)

    def gated_matmul(
        self,
        x: ops.Rows,
        activation: Literal["silu", "gelu_tanh"],
        bias: Tensor | None = None,
        *,
        scales: bool = False,
    ) -> ops.Rows:
        """As PlainWeight.gated_matmul."""
        assert isinstance(x, Tensor)
        numbers, group = self.form
        gated = ops.patched_gated_linear(
            self._ordered(x), self.patches, activation, bias, numbers=numbers, group=group, frozen=True
        )
        return _rows(gated, scales)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(1, self.order)

    def rows(self, numbers: Tensor) -> Tensor:
        """As PlainWeight.rows."""
        patches = self.patches.index_select(0, numbers // ops.PATCH_ROWS)
        found = ops.unpack(patches, *self.form, self._columns.share)
        if self.order is not None:
            found = torch.empty_like(found).index_copy_(1, self.order.long(), found)
        found = found.unflatten(0, (-1, ops.PATCH_ROWS))
        return found[torch.arange(len(numbers), device=numbers.device), numbers % ops.PATCH_ROWS].to(self._dtype)

    def named_slots(self, name: str) -> dict[SlotName, Slot]:
        """As PlainWeight.named_slots."""
        slots: dict[SlotName, Slot] = {}
        row = 0
        for part in self._parts:
            share, start = (count // ops.PATCH_ROWS for count in (part.share, part.start))
            patches = self.patches[row : row + share]
            slot = _slot(patches, part._replace(start=start), self._in_patches, self.form)
            slots[name, part.shard] = replace(slot, shape=(part.size, self._columns.size))
            row += share
        return slots


class MixedWeight(nn.Module):
    """A matrix in patches whose parts are of different forms: a PatchedWeight for each run of neighbouring parts of one
    form, whose products stand side by side."""

    plain = None
    takes_scaled_rows = False

    def __init__(self, runs: Sequence[PatchedWeight]) -> None:
        super().__init__()
        self._runs = list(runs)
        self._sizes = [len(run.patches) * ops.PATCH_ROWS for run in runs]
        self.runs = nn.ModuleList(runs)

    def matmul(self, x: ops.Rows, bias: Tensor | None = None) -> Tensor:
        """As PlainWeight.matmul."""
        biases = [None] * len(self._runs) if bias is None else bias.split(self._sizes)
        return torch.cat([run.matmul(x, each) for run, each in zip(self._runs, biases, strict=True)], dim=-1)

    def gated_matmul(
        self,
        x: ops.Rows,
        activation: Literal["silu", "gelu_tanh"],
        bias: Tensor | None = None,
        *,
        scales: bool = False,
    ) -> ops.Rows:
        """As PlainWeight.gated_matmul."""
        return _rows(_gated(self.matmul(x, bias), activation), scales)

    def rows(self, numbers: Tensor) -> Tensor:
        """As PlainWeight.rows."""
        found, first = torch.zeros(()), 0
        for run, size in zip(self._runs, self._sizes, strict=True):
            own = numbers - first
            is_own = ((own >= 0) & (own < size)).unsqueeze(-1)
            found = torch.where(is_own, run.rows(own.clamp(0, size - 1)), found.to(numbers.device))
            first += size
        return found

    def named_slots(self, name: str) -> dict[SlotName, Slot]:
        """As PlainWeight.named_slots."""
        return {slot_name: slot for run in self._runs for slot_name, slot in run.named_slots(name).items()}


Weight = PlainWeight | BlockWeight | ScaledWeight | PatchedWeight | MixedWeight


def make_weight(
    parts: Sequence[Part],
    columns: Columns,
    forms: Forms,
    *,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
) -> Weight:
    """This rank's part of a matrix. It is in blocks where all parts have a form whose blocks the rank's columns do not
    cut, and in codes with scales, or in patches that nothing cuts, where all parts are and the device has kernels for
    their sizes; the loader decodes what a plain matrix is stored as. `deterministic`: as in ParallelContext."""
    found = [forms.get(part.shard) or forms.get(None) for part in parts]
    blocks = [form for form in found if isinstance(form, BlockForm) and columns.in_blocks(form) is not None]
    if len(blocks) == len(parts):
        return BlockWeight(parts, columns, blocks, dtype=dtype, device=device)
    if (patched := _in_patches(parts, columns, found, dtype=dtype, device=device)) is not None:
        return patched
    (kind, *others) = set(found)
    num_rows = sum(part.share + part.padding for part in parts)
    kept_as = kind if isinstance(kind, torch.dtype) and not others else None
    if kept_as == ops.CODES:
        has_kernels = dtype.itemsize == _HALF and ops.takes_scaled(num_rows, columns.share, device)
        if device.type != "cuda" or has_kernels:
            return ScaledWeight(parts, columns, dtype=dtype, device=device)
        kept_as = None
    plain = InvariantWeight if deterministic else PlainWeight
    return plain(parts, columns, dtype=dtype, device=device, kept_as=kept_as)


def _in_patches(
    parts: Sequence[Part],
    columns: Columns,
    forms: Sequence[Form | None],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> PatchedWeight | MixedWeight | None:
    """None where a part is in no patches, something cuts them, or the device has no kernels for them."""
    grouped = groupby(zip(forms, parts, strict=True), key=lambda pair: pair[0])
    runs = [(form, [part for _, part in pairs]) for form, pairs in grouped]
    weights: list[tuple[PatchForm | OrderedForm, list[Part]]] = []
    for kept_as, run in runs:
        form = kept_as.patches if isinstance(kept_as, OrderedForm) else kept_as
        if not isinstance(form, PatchForm) or not _can_be_patches(run) or columns.in_patches(form) is None:
            return None
        # The groups of columns that are sorted have columns on every rank; one product has one order.
        if isinstance(kept_as, OrderedForm) and (columns.share < columns.size or len(runs) > 1):
            return None
        num_rows = sum(part.share for part in run)
        # Elsewhere than on a GPU torch's operators compute with patches; there they would be far too slow.
        if device.type == "cuda" and not ops.takes_patched(form.numbers, num_rows, columns.share, dtype, device):
            return None
        weights.append((kept_as, run))
    made = [PatchedWeight(run, columns, form, dtype=dtype, device=device) for form, run in weights]
    return made[0] if len(made) == 1 else MixedWeight(made)


def _can_be_patches(parts: Sequence[Part]) -> bool:
    """Whether every part begins and ends where rows of patches do."""
    return not any(count % ops.PATCH_ROWS or part.padding for part in parts for count in (part.share, part.start))


def _rows(numbers: Tensor, scales: bool) -> ops.Rows:
    """What a layer takes whose weight `takes_scaled_rows`, if `scales` says so."""
    return ops.scale_rows(numbers) if scales else numbers


def _gated(product: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    return ops.silu_mul(product) if activation == "silu" else ops.gelu_tanh_mul(product)


def _slot(
    destination: Tensor,
    part: Part,
    columns: Columns,
    form: BlockForm | PatchForm | None = None,
    scales: Tensor | None = None,
) -> Slot:
    shape = (part.size, columns.size)
    if columns.share < columns.size:
        return Slot(destination, shape, dim=1, start=columns.start, form=form, scales=scales)
    return Slot(destination, shape, start=part.start, form=form, scales=scales)
