"""Norms: by the root mean square (arXiv:1910.07467), and the older one by mean and variance (arXiv:1607.06450)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylm import ops
from raylm.layers.halves import Halves
from raylm.layers.heads import HeadShare
from raylm.layers.slots import Slot, SlotName, empty_parameter
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext, Sent


class RMSNorm(nn.Module):
    """Norm over the last dimension. `offset` is added to the checkpoint's weights: some families store weight - 1.
    With `sums` it follows a RowParallelLinear, and does the sum over the tensor ranks that this left to it. With
    `scales` it returns ScaledRows."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
        offset: float = 0.0,
        sums: bool = False,
        scales: bool = False,
    ) -> None:
        super().__init__()
        self._context = context
        self._sums = sums
        self._scales = scales
        self._eps = eps
        self._offset = offset
        self.weight = empty_parameter(size, dtype=dtype, device=context.device)

    def forward(self, x: Tensor, delta: Tensor | Sent | Halves | None = None) -> ops.Rows:
        """The norm of x [..., size]; with a delta (of x's shape), this is added to x in place first."""
        if isinstance(delta, Halves):
            if not self._scales:
                return ops.add_halves_rms_norm(delta.parts, x, self.weight, self._eps)
            delta = delta.total()
        if self._scales:
            return self._scaled(x, delta)
        if self._context.deterministic:
            assert not isinstance(delta, Sent), "deterministic ranks send nothing"
            return self._invariant(x, delta)
        if delta is None:
            return ops.rms_norm(x, self.weight, self._eps)
        if self._sums:
            return collectives.add_rms_norm(delta, x, self.weight, self._eps, self._context)
        return ops.add_rms_norm(delta, x, self.weight, self._eps)

    def _invariant(self, x: Tensor, delta: Tensor | None) -> Tensor:
        if delta is None:
            return ops.invariant_rms_norm(x, self.weight, self._eps)
        return ops.invariant_rms_norm(delta, self.weight, self._eps, x)

    def _scaled(self, x: Tensor, delta: Tensor | Sent | None) -> ops.ScaledRows:
        if delta is None:
            return ops.scaled_rms_norm(x, self.weight, self._eps)
        if self._sums and collectives.norm_sums(delta, self._context):
            return ops.scale_rows(collectives.add_rms_norm(delta, x, self.weight, self._eps, self._context))
        return ops.scaled_rms_norm(delta, self.weight, self._eps, x)

    def slots(self) -> dict[SlotName, Slot]:
        return {("weight", None): Slot(self.weight, tuple(self.weight.shape), offset=self._offset)}


class LayerNorm(nn.Module):
    """Norm over the last dimension by mean and variance; `offset` and `scales` are as in RMSNorm. What it follows is
    summed over the tensor ranks."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
        bias: bool = True,
        offset: float = 0.0,
        scales: bool = False,
    ) -> None:
        super().__init__()
        self._scales = scales
        self._eps = eps
        self._offset = offset
        self.weight = empty_parameter(size, dtype=dtype, device=context.device)
        self.bias = empty_parameter(size, dtype=dtype, device=context.device) if bias else None

    def forward(self, x: Tensor, delta: Tensor | None = None) -> ops.Rows:
        """As RMSNorm.forward."""
        if delta is not None:
            x.add_(delta)
        normed = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)
        return ops.scale_rows(normed) if self._scales else normed

    def slots(self) -> dict[SlotName, Slot]:
        slots: dict[SlotName, Slot] = {
            ("weight", None): Slot(self.weight, tuple(self.weight.shape), offset=self._offset)
        }
        if self.bias is not None:
            slots["bias", None] = Slot(self.bias, tuple(self.bias.shape))
        return slots


class EachHeadNorm(nn.Module):
    """A LayerNorm without bias of each head, which has weights of its own. x: [T, heads of this rank, head_dim]."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        context: ParallelContext,
        dtype: torch.dtype,
        apart: bool = False,
    ) -> None:
        """`num_heads`: of all ranks. `apart`: checkpoints have a tensor for each head, by its number."""
        super().__init__()
        self._eps = eps
        self._apart = apart
        self._heads = HeadShare.of(num_heads, context)
        self.weight = empty_parameter(self._heads.count, head_dim, dtype=dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self._eps)
        return normed.mul_(self.weight.float()).to(x.dtype)

    def slots(self) -> dict[SlotName, Slot]:
        heads, size = self._heads, self.weight.shape[1]
        if not self._apart:
            return {("weight", None): Slot(self.weight, (heads.total, size), start=heads.first)}
        own = range(heads.first, heads.first + heads.count)
        nowhere = self.weight.view(-1)[:0]
        return {
            (f"{head}.weight", None): Slot(self.weight[head - heads.first] if head in own else nowhere, (size,))
            for head in range(heads.total)
        }


class AllHeadsNorm(nn.Module):
    """An RMS norm over all heads of all ranks together. x: [T, heads of this rank, head_dim]."""

    def __init__(
        self, num_heads: int, head_dim: int, eps: float, *, context: ParallelContext, dtype: torch.dtype
    ) -> None:
        """`num_heads`: of all ranks."""
        super().__init__()
        self._context = context
        self._eps = eps
        self._heads = HeadShare.of(num_heads, context)
        self.weight = empty_parameter(self._heads.count * head_dim, dtype=dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        if self._context.deterministic and self._context.tensor_size == 1:
            return ops.invariant_rms_norm(x.flatten(1), self.weight, self._eps).view_as(x)
        wide = x.float().flatten(1)
        squares = wide.square().sum(dim=-1, keepdim=True)
        heads, ranks = self._heads, self._context.tensor_size
        if ranks > 1:
            # Ranks that share a head of keys each count it.
            squares = collectives.all_reduce(squares, self._context) * (heads.total / (heads.count * ranks))
        mean = squares / (wide.shape[1] // heads.count * heads.total)
        return (wide * torch.rsqrt(mean + self._eps) * self.weight.float()).to(x.dtype).view_as(x)

    def slots(self) -> dict[SlotName, Slot]:
        head_dim = len(self.weight) // self._heads.count
        shape, start = (self._heads.total * head_dim,), self._heads.first * head_dim
        return {("weight", None): Slot(self.weight, shape, start=start)}
