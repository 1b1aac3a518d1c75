"""The experts of a layer, each of them split between tensor ranks as an MLP is."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.slots import Slot, SlotName, empty_parameter
from raylm.parallel.context import ParallelContext


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
        context: ParallelContext,
        dtype: torch.dtype,
    ) -> None:
        """`size`: columns between an expert's projections. `limit`: as ops.experts takes it."""
        super().__init__()
        self._activation, self._limit = activation, limit
        self._size = size
        self._share = share = context.split(size, "an expert's intermediate size")
        self._start = context.tensor_rank * share
        device = context.device
        self.gate_up_proj = empty_parameter(num_experts, 2 * share, hidden_size, dtype=dtype, device=device)
        self.down_proj = empty_parameter(num_experts, hidden_size, share, dtype=dtype, device=device)
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = empty_parameter(num_experts, 2 * share, dtype=dtype, device=device)
            self.down_bias = empty_parameter(num_experts, hidden_size, dtype=dtype, device=device)
        # Only one rank adds it, or the sum would hold it once a rank.
        self._adds_down_bias = context.tensor_rank == 0

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden_size], weights and experts as ops.route gives them -> [T, hidden_size]."""
        return ops.experts(
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

    def slots(self) -> dict[SlotName, Slot]:
        """Each expert's as MLPs have them."""
        slots: dict[SlotName, Slot] = {}
        num_experts, hidden_size, share = self.down_proj.shape
        for expert in range(num_experts):
            for number, shard in enumerate(("gate", "up")):
                rows = self.gate_up_proj[expert, number * share : (number + 1) * share]
                name = f"{expert}.gate_up_proj.weight", shard
                slots[name] = Slot(rows, (self._size, hidden_size), start=self._start)
                if self.gate_up_bias is not None:
                    part = self.gate_up_bias[expert, number * share : (number + 1) * share]
                    slots[f"{expert}.gate_up_proj.bias", shard] = Slot(part, (self._size,), start=self._start)
            if self.down_bias is not None:
                slots[f"{expert}.down_proj.bias", None] = Slot(self.down_bias[expert], (hidden_size,))
            shape = (hidden_size, self._size)
            slots[f"{expert}.down_proj.weight", None] = Slot(self.down_proj[expert], shape, dim=1, start=self._start)
        return slots
