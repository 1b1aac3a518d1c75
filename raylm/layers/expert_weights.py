"""The matrices of a layer's experts: how a rank's part of them is stored, filled and multiplied by.

ParallelExperts never looks at how they are stored: it calls `multiply`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.slots import BlockForm, ExpertBlocks, PatchForm, Slot, SlotName, empty_parameter, row_bytes
from raylm.layers.weight import Columns

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]


class ExpertSizes(NamedTuple):
    """`size` columns are between an expert's projections, of which a rank has `share` from `start` on."""

    num_experts: int
    hidden: int
    size: int
    share: int
    start: int

    @property
    def columns(self) -> Columns:
        """This rank's columns of an expert's down_proj."""
        return Columns(self.size, self.share, self.start)


class Biases(NamedTuple):
    """As ops.experts takes them."""

    gate_up: Tensor | None
    down: Tensor | None


class PlainExperts(nn.Module):
    """Floating-point numbers: gate_up_proj [E, 2 * share, hidden], gate's rows first; down_proj [E, hidden, share]."""

    form = None

    def __init__(self, sizes: ExpertSizes, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._sizes = sizes
        count, hidden, _, share, _ = sizes
        self.gate_up_proj = empty_parameter(count, 2 * share, hidden, dtype=dtype, device=device)
        self.down_proj = empty_parameter(count, hidden, share, dtype=dtype, device=device)

    def multiply(
        self, x: Tensor, weights: Tensor, chosen: Tensor, activation: Activation, biases: Biases, limit: float
    ) -> Tensor:
        """As ops.experts."""
        return ops.experts(
            x,
            self.gate_up_proj,
            self.down_proj,
            weights,
            chosen,
            activation,
            gate_up_bias=biases.gate_up,
            down_bias=biases.down,
            limit=limit,
        )

    def slots_of(self, expert: int) -> dict[SlotName, Slot]:
        """Of one expert's matrices, named as an MLP's."""
        _, hidden, size, share, start = self._sizes
        gate, up = self.gate_up_proj[expert].split(share)
        down = Slot(self.down_proj[expert], (hidden, size), dim=1, start=start)
        return _named(*(Slot(part, (size, hidden), start=start) for part in (gate, up)), down)


class PatchedExperts(nn.Module):
    """Codes in patches of one form: gate_up_proj uint8 [E, 2 * share / 16, bytes], gate's rows first, and down_proj
    [E, hidden / 16, bytes]."""

    def __init__(self, sizes: ExpertSizes, form: PatchForm, *, device: torch.device) -> None:
        super().__init__()
        self._sizes, self.form = sizes, form
        count, hidden, _, share, _ = sizes

        def patches(rows: int, columns: int) -> nn.Parameter:
            shape = (count, rows // ops.PATCH_ROWS, row_bytes(form, columns))
            return empty_parameter(*shape, dtype=torch.uint8, device=device)

        self.gate_up_proj, self.down_proj = patches(2 * share, hidden), patches(hidden, share)

    def multiply(
        self, x: Tensor, weights: Tensor, chosen: Tensor, activation: Activation, biases: Biases, limit: float
    ) -> Tensor:
        """As ops.experts."""
        return ops.patched_experts(
            x,
            self.gate_up_proj,
            self.down_proj,
            weights,
            chosen,
            activation,
            numbers=self.form.numbers,
            group=self.form.group,
            gate_up_bias=biases.gate_up,
            down_bias=biases.down,
            limit=limit,
        )

    def slots_of(self, expert: int) -> dict[SlotName, Slot]:
        """As PlainExperts.slots_of."""
        _, hidden, size, share, start = self._sizes
        gate, up = self.gate_up_proj[expert].split(share // ops.PATCH_ROWS)
        first = start // ops.PATCH_ROWS
        first_byte = row_bytes(self.form, start)
        down = Slot(self.down_proj[expert], (hidden, size), dim=1, start=first_byte, form=self.form)
        return _named(*(Slot(part, (size, hidden), start=first, form=self.form) for part in (gate, up)), down)


class BlockExperts(nn.Module):
    """Blocks as GGUF files have them, uint8: gate_proj and up_proj [E, share, bytes], down_proj [E, hidden, bytes].

    Products are computed from the blocks, with activations quantised to 16 bits (raylm.ops.block_experts).
    """

    def __init__(self, sizes: ExpertSizes, form: ExpertBlocks, *, device: torch.device) -> None:
        super().__init__()
        self._sizes, self.form = sizes, form
        self._kinds = [each.kind for each in form]
        count, hidden, _, share, _ = sizes
        across = Columns.whole(hidden)

        def blocks(rows: int, columns: Columns, of: BlockForm) -> tuple[nn.Parameter, Columns]:
            in_bytes = columns.in_blocks(of)
            assert in_bytes is not None
            return empty_parameter(count, rows, in_bytes.share, dtype=torch.uint8, device=device), in_bytes

        self.gate_proj, gate = blocks(share, across, form.gate)
        self.up_proj, up = blocks(share, across, form.up)
        self.down_proj, down = blocks(hidden, sizes.columns, form.down)
        self._in_bytes = gate, up, down

    def multiply(
        self, x: Tensor, weights: Tensor, chosen: Tensor, activation: Activation, biases: Biases, limit: float
    ) -> Tensor:
        """As ops.experts."""
        return ops.block_experts(
            x,
            [self.gate_proj, self.up_proj, self.down_proj],
            self._kinds,
            weights,
            chosen,
            activation,
            gate_up_bias=biases.gate_up,
            down_bias=biases.down,
            limit=limit,
        )

    def slots_of(self, expert: int) -> dict[SlotName, Slot]:
        """As PlainExperts.slots_of; shapes count bytes."""
        _, hidden, size, _, start = self._sizes
        gate, up, down = self._in_bytes
        return _named(
            Slot(self.gate_proj[expert], (size, gate.size), start=start, form=self.form.gate),
            Slot(self.up_proj[expert], (size, up.size), start=start, form=self.form.up),
            Slot(self.down_proj[expert], (hidden, down.size), dim=1, start=down.start, form=self.form.down),
        )


ExpertWeights = PlainExperts | PatchedExperts | BlockExperts


def make_expert_weights(
    sizes: ExpertSizes, form: PatchForm | ExpertBlocks | None, *, dtype: torch.dtype, device: torch.device
) -> ExpertWeights:
    """A rank's part of the experts' matrices. They have `dtype` where they have no form, ranks cut a patch or a block,
    or the device has no kernels for their sizes; the loader decodes what is stored otherwise."""
    if isinstance(form, PatchForm) and _can_be_patches(sizes, form, dtype, device):
        return PatchedExperts(sizes, form, device=device)
    if isinstance(form, ExpertBlocks) and sizes.columns.in_blocks(form.down):
        return BlockExperts(sizes, form, device=device)
    return PlainExperts(sizes, dtype=dtype, device=device)


def _can_be_patches(sizes: ExpertSizes, form: PatchForm, dtype: torch.dtype, device: torch.device) -> bool:
    return not sizes.columns.cuts_patches and ops.takes_patched_experts(
        form.numbers, sizes.num_experts, sizes.hidden, sizes.share, dtype, device
    )


def _named(gate: Slot, up: Slot, down: Slot) -> dict[SlotName, Slot]:
    return {
        ("gate_up_proj.weight", "gate"): gate,
        ("gate_up_proj.weight", "up"): up,
        ("down_proj.weight", None): down,
    }
