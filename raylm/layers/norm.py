"""Norms: by the root mean square (arXiv:1910.07467), and the older one by mean and variance (arXiv:1607.06450)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """The norm of x [..., size]; with a delta (of x's shape), this is added to x in place first."""
        if delta is None:
            return ops.rms_norm(x, self.weight, self._eps)
        if self._sums:
            return collectives.add_rms_norm(delta, x, self.weight, self._eps, self._context)
        return ops.add_rms_norm(delta, x, self.weight, self._eps)

    def slots(self) -> dict[SlotName, Slot]:
        return {("weight", None): Slot(self.weight, tuple(self.weight.shape), offset=self._offset)}


class LayerNorm(nn.Module):
    """Norm over the last dimension with a bias. What it follows has been summed over the tensor ranks."""

    def __init__(self, size: int, eps: float, *, context: ParallelContext, dtype: torch.dtype) -> None:
        super().__init__()
        self._eps = eps
        self.weight = empty_parameter(size, dtype=dtype, device=context.device)
        self.bias = empty_parameter(size, dtype=dtype, device=context.device)

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """As RMSNorm.forward."""
        if delta is not None:
            x.add_(delta)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)

    def slots(self) -> dict[SlotName, Slot]:
        return {(name, None): Slot(parameter, tuple(parameter.shape)) for name, parameter in self.named_parameters()}
