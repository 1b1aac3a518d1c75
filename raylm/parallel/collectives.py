"""What tensor ranks say to each other. With one rank each is a no-op."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from raylm.parallel.context import ParallelContext


def all_reduce(x: Tensor, context: ParallelContext) -> Tensor:
    """The sum of every rank's x, in place."""
    if context.tensor_size > 1:
        dist.all_reduce(x, group=context.group)
    return x


def all_gather(x: Tensor, context: ParallelContext) -> Tensor:
    """Every rank's x [..., n], joined along the last dimension in the order of ranks: [..., n * tensor_size]."""
    if context.tensor_size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(context.tensor_size)]
    dist.all_gather(parts, x.contiguous(), group=context.group)
    return torch.cat(parts, dim=-1)
