"""Linear layers whose weights are split between tensor ranks, and fused where one product can serve several.

Column-parallel layers split their outputs, row-parallel layers their inputs, so a column layer followed by a row layer
needs one sum over the ranks at the end (Megatron-LM, arXiv:1909.08053). Every layer maps [T, K] to [T, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from raylm import ops
from raylm.layers.halves import Halves, in_halves
from raylm.layers.heads import HeadShare
from raylm.layers.slots import Slot, SlotName, empty_parameter
from raylm.layers.weight import PLAIN, Columns, Forms, Part, make_weight
from raylm.parallel import collectives
from raylm.parallel.context import ParallelContext, Sent

MIN_ROWS_TO_ADD = 1024
"""Measured at 8,192 rows on an H200: product, sum and norm of 4,096 columns take 460 instead of 481 us where the inputs
are 4,096, and 1,467 instead of 1,494 where they are 14,336."""


class _FusedColumnLinear(nn.Module):
    """Outputs are split between the ranks, part by part."""

    def __init__(
        self,
        in_size: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        context: ParallelContext,
        dtype: torch.dtype,
        forms: Forms,
    ) -> None:
        super().__init__()
        self._parts = parts
        device = context.device
        self.weight = make_weight(
            parts, Columns.whole(in_size), forms, dtype=dtype, device=device, deterministic=context.deterministic
        )
        out_size = sum(part.share for part in parts)
        self.bias = empty_parameter(out_size, dtype=dtype, device=device) if bias else None

    def forward(self, x: ops.Rows) -> ops.Rows:
        return self.weight.matmul(x, self.bias)

    def slots(self) -> dict[SlotName, Slot]:
        slots = self.weight.named_slots("weight")
        if self.bias is not None:
            for part, shared in zip(self._parts, self.bias.split([part.share for part in self._parts]), strict=True):
                slots["bias", part.shard] = Slot(shared, (part.size,), start=part.start)
        return slots


class ColumnParallelLinear(_FusedColumnLinear):
    """One projection, outputs split between the ranks: returns [T, this rank's outputs]."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        context: ParallelContext,
        dtype: torch.dtype,
        forms: Forms = PLAIN,
        unit: int = 1,
    ) -> None:
        """`unit`: as in ParallelContext.shares."""
        share = context.share(out_size, "a linear layer's output size", unit)
        parts = [Part(None, out_size, len(share), share.start)]
        super().__init__(in_size, parts, bias=bias, context=context, dtype=dtype, forms=forms)


class ReplicatedLinear(_FusedColumnLinear):
    """One projection without bias that every rank holds whole: returns [T, out_size] on each of them."""

    def __init__(
        self, in_size: int, out_size: int, *, context: ParallelContext, dtype: torch.dtype, forms: Forms = PLAIN
    ) -> None:
        parts = [Part(None, out_size, out_size, 0)]
        super().__init__(in_size, parts, bias=False, context=context, dtype=dtype, forms=forms)


class GatedParallelLinear(_FusedColumnLinear):
    """act(gate(x)) * up(x), both projections in one product, outputs split between the ranks: returns
    [T, this rank's outputs]."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        activation: Literal["silu", "gelu_tanh"],
        *,
        bias: bool,
        context: ParallelContext,
        dtype: torch.dtype,
        forms: Forms = PLAIN,
        scales: bool = False,
        unit: int = 1,
    ) -> None:
        """`scales`: return ScaledRows, as the product behind takes them. `unit`: as in ParallelContext.shares."""
        share = context.share(out_size, "intermediate_size", unit)
        parts = [Part(shard, out_size, len(share), share.start) for shard in ("gate", "up")]
        super().__init__(in_size, parts, bias=bias, context=context, dtype=dtype, forms=forms)
        self._activation, self._scales = activation, scales

    def forward(self, x: ops.Rows) -> ops.Rows:
        return self.weight.gated_matmul(x, self._activation, self.bias, scales=self._scales)


class QKVParallelLinear(_FusedColumnLinear):
    """Queries, keys and values in one product, split by heads: returns [T, (num_heads + 2 * num_kv_heads) * head_dim]
    of this rank. Where there are fewer key/value heads than ranks, neighbouring ranks hold the same one.

    `num_heads` and `num_kv_heads` are this rank's.
    """

    def __init__(
        self,
        in_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        context: ParallelContext,
        dtype: torch.dtype,
        forms: Forms = PLAIN,
    ) -> None:
        self_heads, kv_heads = context.split(num_heads, "num_attention_heads"), HeadShare.of(num_kv_heads, context)
        q_share = self_heads * head_dim
        kv = (num_kv_heads * head_dim, kv_heads.count * head_dim, kv_heads.first * head_dim)
        parts = [
            Part("q", num_heads * head_dim, q_share, context.tensor_rank * q_share),
            Part("k", *kv),
            Part("v", *kv),
        ]
        super().__init__(in_size, parts, bias=bias, context=context, dtype=dtype, forms=forms)
        self.num_heads = self_heads
        self.num_kv_heads = kv_heads.count


class RowParallelLinear(nn.Module):
    """Inputs are split between the ranks, which sum their results: takes [T, this rank's inputs], returns the full
    [T, out_size] on every rank. With `norm_follows`, the next RMSNorm sums over the ranks: where collectives.norm_sums,
    this returns the rank's partial sum."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        context: ParallelContext,
        dtype: torch.dtype,
        norm_follows: bool = False,
        forms: Forms = PLAIN,
        unit: int = 1,
    ) -> None:
        """`unit`: as in ParallelContext.shares."""
        super().__init__()
        self._norm_follows = norm_follows
        self._context = context
        share = context.share(in_size, "a linear layer's input size", unit)
        columns = Columns(in_size, len(share), share.start)
        self.weight = make_weight(
            [Part(None, out_size, out_size, 0)],
            columns,
            forms,
            dtype=dtype,
            device=context.device,
            deterministic=context.deterministic,
        )
        self.bias = empty_parameter(out_size, dtype=dtype, device=context.device) if bias else None
        # Only one rank adds the bias, or the sum would hold it once a rank.
        self._adds_bias = context.tensor_rank == 0

    def forward(self, x: ops.Rows) -> Tensor:
        """The product, summed over the ranks unless the norm behind it does that."""
        return collectives.all_reduce_or_leave(self.partial(x), self._context, norm_follows=self._norm_follows)

    def partial(self, x: ops.Rows) -> Tensor:
        """This rank's share of the sum."""
        return self.weight.matmul(x, self.bias if self._adds_bias else None)

    def add_product(self, residual: Tensor, x: ops.Rows, multiplier: float) -> bool:
        """Add multiplier * product to `residual` [T, out_size] where that spares writing and reading it again; whether
        it was. Few rows are for raylm's own product and norm."""
        plain = self._lone_weight
        if plain is None or not isinstance(x, Tensor) or not x.is_cuda or len(x) < MIN_ROWS_TO_ADD:
            return False
        residual.addmm_(x, plain.t(), alpha=multiplier)
        return True

    def product_in_halves(self, x: ops.Rows) -> Halves | None:
        """The product for the norm that follows, as halves that it adds up, where that is faster; None elsewhere."""
        plain = self._lone_weight
        return in_halves(x, plain) if plain is not None and isinstance(x, Tensor) else None

    @property
    def _lone_weight(self) -> Tensor | None:
        """The weight, where a norm follows and neither a bias nor other ranks' shares are added to the product; else
        None."""
        is_alone = self._norm_follows and self._context.tensor_size == 1 and self.bias is None
        return self.weight.plain if is_alone else None

    def send_product(self, x: ops.Rows) -> Sent | None:
        """The product for the norm that follows, with the other ranks' rows sent while it is computed
        (collectives.sent); None where the caller should use `forward`. Quantised weights are excluded: they would be
        decoded once for each rank's rows."""
        plain = self.weight.plain
        if not self._norm_follows or plain is None or not isinstance(x, Tensor):
            return None
        return collectives.sent(lambda rows: self.partial(x[rows]), len(x), len(plain) * x.itemsize, self._context)

    def slots(self) -> dict[SlotName, Slot]:
        slots = self.weight.named_slots("weight")
        if self.bias is not None:
            slots["bias", None] = Slot(self.bias, tuple(self.bias.shape))
        return slots
