"""Linear biases of attention in place of position embeddings: their slopes (ALiBi, arXiv:2108.12409)."""

from __future__ import annotations

import torch
from torch import Tensor

from raylm.parallel.context import ParallelContext


def alibi_slopes(num_heads: int) -> Tensor:
    """The slope of each head, for ops.paged_attention: float32 [num_heads].

    For n heads, a power of two, head i has 2 ** (-8 * (i + 1) / n). Other numbers take the slopes of the largest power
    of two below them, and after these every second one, from the first on, of twice that power.
    """
    power = 1 << (num_heads.bit_length() - 1)
    return torch.cat([_geometric(power), _geometric(2 * power)[::2][: num_heads - power]])


def alibi_slopes_of_rank(num_heads: int, context: ParallelContext) -> Tensor:
    """Those of this tensor rank's heads, on its device."""
    share = context.split(num_heads, "num_attention_heads")
    return alibi_slopes(num_heads).narrow(0, context.tensor_rank * share, share).to(context.device)


def _geometric(num_heads: int) -> Tensor:
    return torch.exp2(-8.0 / num_heads * torch.arange(1, num_heads + 1, dtype=torch.float32))
