"""Tensor ranks as threads of one process."""

from __future__ import annotations

import threading

import torch

from raylm.parallel.collectives import share_of
from raylm.parallel.context import ParallelContext


class ThreadedRanks:
    """Collectives between threads of this process, one a rank."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, x: torch.Tensor, context: ParallelContext) -> list[torch.Tensor]:
        self._parts[context.tensor_rank] = x.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def all_reduce(self, x: torch.Tensor, context: ParallelContext) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange(x, context)).sum(0))

    def all_gather(self, x: torch.Tensor, context: ParallelContext, *, split: bool = False) -> torch.Tensor:
        joined = torch.cat(self.exchange(x, context), -1)
        return joined[share_of(len(joined), context)] if split else joined
