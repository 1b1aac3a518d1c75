"""The experts of a layer, each of them split between tensor ranks as an MLP is."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.slots import PatchForm, Slot, SlotName, empty_parameter, row_bytes
from raylm.parallel.context import ParallelContext

_SIZE = "an expert's intermediate size"


class ParallelExperts(nn.Module):
    """Gated MLPs, of which each token goes through a few. Returns this rank's share of the sum."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        size: int,
        activation: Literal["silu", "gelu_tanh", "clamped_swiglu"],
        *,
        bias: bool = False,
        limit: float = 0.0,
        form: PatchForm | None = None,
        context: ParallelContext,
        dtype: torch.dtype,
    ) -> None:
        """`size`: columns between an expert's projections. `limit`: as ops.experts takes it. `form`: of the weights
        where they are codes; if the device has no kernels for it, or there are fewer patches than ranks, they have the
        dtype."""
        super().__init__()
        self._activation, self._limit = activation, limit
        self._hidden, self._size = hidden_size, size
        device = context.device
        self.form = form if form is not None and _can_be(form, num_experts, hidden_size, size, dtype, context) else None
        columns = context.share(size, _SIZE, 1 if self.form is None else ops.PATCH_COLUMNS)
        self._start, self._share = columns.start, len(columns)
        share = self._share
        kept_as, unit = (dtype, 1) if self.form is None else (torch.uint8, ops.PATCH_ROWS)
        self.gate_up_proj = empty_parameter(
            num_experts, 2 * share // unit, self._width(hidden_size), dtype=kept_as, device=device
        )
        self.down_proj = empty_parameter(
            num_experts, hidden_size // unit, self._width(share), dtype=kept_as, device=device
        )
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = empty_parameter(num_experts, 2 * share, dtype=dtype, device=device)
            self.down_bias = empty_parameter(num_experts, hidden_size, dtype=dtype, device=device)
        # Only one rank adds it, or the sum would hold it once a rank.
        self._adds_down_bias = context.tensor_rank == 0

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden_size], weights and experts as ops.route gives them -> [T, hidden_size]."""
        form = self.form
        multiply = ops.experts if form is None else partial(ops.patched_experts, numbers=form.numbers, group=form.group)
        return multiply(
            x,
            self.gate_up_proj,
            self.down_proj,
            weights,
            chosen,
            self._activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias if self._adds_down_bias else None,
            limit=self._limit,
        )

    @property
    def num_values(self) -> int:
        """Of the weights, whatever they are kept as."""
        return 3 * len(self.down_proj) * self._share * self._hidden

    def _width(self, columns: int) -> int:
        """Elements of a row, or of a row of patches."""
        return columns if self.form is None else row_bytes(self.form, columns)

    def slots(self) -> dict[SlotName, Slot]:
        """Each expert's as MLPs have them."""
        slots: dict[SlotName, Slot] = {}
        form, hidden_size, share = self.form, self._hidden, self._share
        unit = 1 if form is None else ops.PATCH_ROWS
        rows = share // unit
        for expert in range(len(self.down_proj)):
            for number, shard in enumerate(("gate", "up")):
                part = self.gate_up_proj[expert, number * rows : (number + 1) * rows]
                name = f"{expert}.gate_up_proj.weight", shard
                slots[name] = Slot(part, (self._size, hidden_size), start=self._start // unit, form=form)
                if self.gate_up_bias is not None:
                    part = self.gate_up_bias[expert, number * share : (number + 1) * share]
                    slots[f"{expert}.gate_up_proj.bias", shard] = Slot(part, (self._size,), start=self._start)
            if self.down_bias is not None:
                slots[f"{expert}.down_proj.bias", None] = Slot(self.down_bias[expert], (hidden_size,))
            down, start = self.down_proj[expert], self._width(self._start)
            shape = (hidden_size, self._size)
            slots[f"{expert}.down_proj.weight", None] = Slot(down, shape, dim=1, start=start, form=form)
        return slots


def _can_be(
    form: PatchForm, num_experts: int, hidden: int, size: int, dtype: torch.dtype, context: ParallelContext
) -> bool:
    """Whether the device has kernels for every rank's share of such experts, and none begins within a patch."""
    return all(
        columns.start % ops.PATCH_COLUMNS == 0
        and ops.takes_patched_experts(form.numbers, num_experts, hidden, len(columns), dtype, context.device)
        for columns in context.shares(size, _SIZE, ops.PATCH_COLUMNS)
    )
