"""The experts of a layer, each of them split between tensor ranks as an MLP is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raylm.layers.expert_weights import Activation, Biases, ExpertSizes, make_expert_weights
from raylm.layers.slots import ExpertBlocks, PatchForm, Slot, SlotName, empty_parameter
from raylm.layers.weight import column_unit
from raylm.parallel.context import ParallelContext


class ParallelExperts(nn.Module):
    """Gated MLPs, of which each token goes through a few. Returns this rank's share of the sum."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        size: int,
        activation: Activation,
        *,
        bias: bool = False,
        limit: float = 0.0,
        form: PatchForm | ExpertBlocks | None = None,
        context: ParallelContext,
        dtype: torch.dtype,
    ) -> None:
        """`size`: columns between an expert's projections. `limit`: as ops.experts takes it. `form`: of the weights
        where they are codes or blocks; make_expert_weights says when they have the dtype all the same."""
        super().__init__()
        self._activation, self._limit = activation, limit
        unit = column_unit(form.down if isinstance(form, ExpertBlocks) else form)
        columns = context.share(size, "an expert's intermediate size", unit)
        share, device = len(columns), context.device
        self._sizes = ExpertSizes(num_experts, hidden_size, size, share, columns.start)
        self.matrices = make_expert_weights(self._sizes, form, dtype=dtype, device=device)
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = empty_parameter(num_experts, 2 * share, dtype=dtype, device=device)
            self.down_bias = empty_parameter(num_experts, hidden_size, dtype=dtype, device=device)
        # Only one rank adds it, or the sum would hold it once a rank.
        self._adds_down_bias = context.tensor_rank == 0

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden_size], weights and experts as ops.route gives them -> [T, hidden_size]."""
        biases = Biases(self.gate_up_bias, self.down_bias if self._adds_down_bias else None)
        return self.matrices.multiply(x, weights, chosen, self._activation, biases, self._limit)

    @property
    def form(self) -> PatchForm | ExpertBlocks | None:
        """What the matrices are kept as; None: numbers of the dtype."""
        return self.matrices.form

    @property
    def num_experts(self) -> int:
        return self._sizes.num_experts

    @property
    def num_values(self) -> int:
        """Of the matrices, whatever they are kept as."""
        return 3 * self._sizes.num_experts * self._sizes.share * self._sizes.hidden

    def slots(self) -> dict[SlotName, Slot]:
        """Each expert's as MLPs have them."""
        slots: dict[SlotName, Slot] = {}
        _, hidden_size, size, share, start = self._sizes
        for expert in range(self.num_experts):
            slots |= {
                (f"{expert}.{name}", shard): slot for (name, shard), slot in self.matrices.slots_of(expert).items()
            }
            if self.gate_up_bias is not None:
                for shard, part in zip(("gate", "up"), self.gate_up_bias[expert].split(share), strict=True):
                    slots[f"{expert}.gate_up_proj.bias", shard] = Slot(part, (size,), start=start)
            if self.down_bias is not None:
                slots[f"{expert}.down_proj.bias", None] = Slot(self.down_bias[expert], (hidden_size,))
        return slots
