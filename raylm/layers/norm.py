"""Root-mean-square norm (arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.slots import Slot, SlotName, empty_parameter
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext


class RMSNorm(nn.Module):
    """Norm over the last dimension. `offset` is added to the checkpoint's weights: some families store weight - 1.
    With `sums` it follows a RowParallelLinear, and does the sum over the tensor ranks that this left to it."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
        offset: float = 0.0,
        sums: bool = False,
    ) -> None:
        super().__init__()
        self._context = context
        self._sums = sums
        self._eps = eps
        self._offset = offset
        self.weight = empty_parameter(size, dtype=dtype, device=context.device)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The norm of x [..., size]; with a residual (of x's shape), x is added to it in place and the sum's norm
        returned."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self._eps)
        if self._sums:
            return collectives.add_rms_norm(x, residual, self.weight, self._eps, self._context)
        return ops.add_rms_norm(x, residual, self.weight, self._eps)

    def slots(self) -> dict[SlotName, Slot]:
        return {("weight", None): Slot(self.weight, tuple(self.weight.shape), offset=self._offset)}
