"""Slots: the places of a layer that a checkpoint fills.

A layer lists its slots, each named by a parameter and, where several checkpoint tensors are fused into one parameter, a
shard. A model is loaded when every slot has been filled exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from raylm import ops

SlotName = tuple[str, str | None]
"""A parameter's name and the shard of it, or None where the slot is the whole parameter."""


class BlockForm(NamedTuple):
    """One of the types of GGUF files that store values in blocks of `values` values and `num_bytes` bytes."""

    kind: int
    """Its number in GGUF files, which operators know it by."""
    name: str
    values: int
    num_bytes: int


class PatchForm(NamedTuple):
    """Codes in patches of 16 rows and 128 columns (raylm/ops/patches.py)."""

    numbers: ops.Numbers
    group: int
    """Columns that share a scale."""

    @property
    def patch_bytes(self) -> int:
        return ops.patch_bytes(self.numbers, self.group)

    def __str__(self) -> str:
        if not self.rounds_rows:
            return f"{self.numbers} with a scale for each {self.group} columns"
        kind, shared = self.unrounded.numbers, "a row" if self == INT8_ROWS else f"for each {self.group} columns"
        of_rows = f"rounded to {kind}, a scale a row, in steps of over {ops.MOST_UNROUNDED[self.numbers]} tokens"
        return f"{kind} with a scale {shared} (activations {of_rows})"

    @property
    def rounds_rows(self) -> bool:
        """Whether products of many rows round activations as the weight is."""
        return self.numbers in ops.MOST_UNROUNDED

    @property
    def unrounded(self) -> PatchForm:
        """The form of the same patches beside activations that stay as they are."""
        others: dict[ops.Numbers, ops.Numbers] = {"int8_rows": "int8", "fp8_rows": "fp8"}
        return self._replace(numbers=others.get(self.numbers, self.numbers))


class OrderedForm(NamedTuple):
    """Patches whose columns are sorted by the group that shares a scale (activation order)."""

    patches: PatchForm
    order: bytes
    """int32: the column that each place holds. Empty for a form that is known from a configuration alone: `places`
    draws an order then."""

    def __str__(self) -> str:
        return f"{self.patches} in activation order"

    def places(self, columns: int, device: torch.device) -> Tensor:
        """`order` of a matrix with so many columns: int32 [columns]."""
        if self.order:
            found = torch.frombuffer(bytearray(self.order), dtype=torch.int32)
        else:
            found = torch.randperm(columns, generator=torch.Generator().manual_seed(0))
        return found.to(device, torch.int32)


class ExpertBlocks(NamedTuple):
    """The types of blocks of a layer's experts: one for all gates, one for all ups, one for all downs."""

    gate: BlockForm
    up: BlockForm
    down: BlockForm


FP8_PATCHES = PatchForm("fp8", ops.PATCH_COLUMNS)
MXFP4_PATCHES = PatchForm("mxfp4", 32)
MXFP8_PATCHES = PatchForm("mxfp8", 32)
INT8_ROWS = PatchForm("int8_rows", ops.PATCH_COLUMNS)
FP8_ROWS = PatchForm("fp8_rows", ops.PATCH_COLUMNS)
FP8_FORMS = (FP8_PATCHES, FP8_ROWS)
"""The two forms of FP8: their patches are the same bytes."""


def row_bytes(form: PatchForm, columns: int) -> int:
    """Of patches beside each other that hold so many columns."""
    return -(-columns // ops.PATCH_COLUMNS) * form.patch_bytes


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one checkpoint tensor goes: its elements start..start+length-1 along `dim` belong into `destination`.

    `shape` is that of the whole checkpoint tensor; `offset` is added to every element. A slot with a `form` takes the
    tensor's blocks or patches, as uint8: its elements are bytes, in `shape` too where they are blocks. With patches
    `shape` counts numbers, `destination` and `start` rows of 16 rows, or bytes. A slot with `scales`, float32, one for
    each row of `destination`, takes rows as codes of 8 bits with a scale each: they are quantised where they are not
    stored so.
    """

    destination: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    offset: float = 0.0
    form: BlockForm | PatchForm | None = None
    scales: Tensor | None = None

    @property
    def length(self) -> int:
        return self.destination.shape[self.dim]

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether `put` computes: numbers of this type are not just copied."""
        return bool(self.offset) or dtype != self.destination.dtype

    def put(self, row: int, piece: ops.Rows) -> None:
        """Write whole rows of the destination, from `row` on. Numbers that it `converts` are on the destination's
        device already, or both are on the CPU."""
        rows = slice(row, row + len(piece))
        if self.scales is None:
            assert isinstance(piece, Tensor)
            # In float32: 1 + a small bfloat16 would lose the small one before it is rounded.
            shifted = piece.float().add_(self.offset) if self.offset else piece
            self.destination[rows].copy_(shifted, non_blocking=True)
            return
        scaled = piece if isinstance(piece, ops.ScaledRows) else ops.scale_rows(piece.float())
        self.destination[rows].copy_(scaled.codes, non_blocking=True)
        self.scales[rows].copy_(scaled.scales, non_blocking=True)


@runtime_checkable
class Loadable(Protocol):
    """A layer with parameters."""

    def slots(self) -> dict[SlotName, Slot]:
        """Every slot of this layer; together they cover its parameters."""
        ...


def slots_of(model: nn.Module) -> dict[SlotName, Slot]:
    """Every slot of a model's layers, by the full name of its parameter."""
    slots: dict[SlotName, Slot] = {}
    for path, module in model.named_modules():
        if module is not model and isinstance(module, Loadable):
            slots |= {(f"{path}.{name}", shard): slot for (name, shard), slot in module.slots().items()}
    return slots


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without values and without gradient: loading fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
