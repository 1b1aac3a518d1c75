"""What ranks say to each other. With one rank each is a no-op."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from raylm import ops
from raylm.parallel.context import ParallelContext, Sent, rows_of_rank

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 has another name for it."""

LEAST_ROWS_TO_SPLIT = 64
"""Sampled rows from which on each tensor rank samples only its share of them."""


def all_reduce(x: Tensor, context: ParallelContext) -> Tensor:
    """The sum of every tensor rank's x, the same to the bit on all of them; x may be overwritten."""
    if context.tensor_size == 1:
        return x
    if context.deterministic:
        return _sum_in_order(x, context)
    if context.reducer is not None and context.reducer.takes(x):
        return context.reducer(x)
    dist.all_reduce(x, group=context.group)
    return x


def _sum_in_order(x: Tensor, context: ParallelContext) -> Tensor:
    """The ranks' x added in the order of ranks, in float32: libraries choose the order by the size of x."""
    first, *others = _parts(x, context)
    total = first.float()
    for part in others:
        total = total + part
    return total.to(x.dtype)


def norm_sums(x: Tensor | Sent, context: ParallelContext) -> bool:
    """Whether a norm takes the tensor ranks' sum of x [T, H] upon itself."""
    if isinstance(x, Sent):
        return True
    return context.reducer is not None and context.reducer.takes_norm(x, x)


def all_reduce_or_leave(x: Tensor, context: ParallelContext, *, norm_follows: bool) -> Tensor:
    """As all_reduce, but this rank's part alone where a norm follows that sums."""
    return x if norm_follows and norm_sums(x, context) else all_reduce(x, context)


def sent(product: Callable[[slice], Tensor], rows: int, row_bytes: int, context: ParallelContext) -> Sent | None:
    """This rank's part of a sum for `add_rms_norm`: `product` maps a slice of `rows` rows to [rows of it, H], and is
    called once for each tensor rank's share. The other ranks' shares are sent while this rank's is computed. None where
    the reducer does not send so many rows of `row_bytes`."""
    reducer = context.reducer
    return reducer.send(product, rows) if reducer is not None and reducer.sends(rows, row_bytes) else None


def add_rms_norm(x: Tensor | Sent, residual: Tensor, weight: Tensor, eps: float, context: ParallelContext) -> Tensor:
    """As ops.add_rms_norm; an x that `norm_sums` is this rank's part of it alone.

    The residual of such an x is for the next norm of as many rows only: its rows may be kept up to date on one rank
    each."""
    if context.reducer is not None and norm_sums(x, context):
        return context.reducer.add_rms_norm(x, residual, weight, eps)
    return ops.add_rms_norm(x, residual, weight, eps)


def all_gather(x: Tensor, context: ParallelContext, *, split: bool = False) -> Tensor:
    """Every tensor rank's x [..., n], joined along the last dimension in the order of ranks: [..., n * tensor_size].
    With `split`, each rank gets only the rows `share_of` names; x is [T, n] then, T a multiple of tensor_size."""
    if context.tensor_size == 1:
        return x
    if context.reducer is not None and context.reducer.takes_gather(x):
        return context.reducer.gather(x, split=split)
    joined = _parts(x, context).movedim(0, -2).flatten(-2)
    return joined[share_of(len(x), context)] if split else joined


def splits_rows(num_rows: int, context: ParallelContext) -> bool:
    """Whether each tensor rank samples only its share of the rows, after which the ranks exchange token ids.

    That costs a second gather, so it takes many rows and a reducer. A share must be even: reducers gather 16 bytes at a
    time, which are two token ids.
    """
    even = num_rows % (2 * context.tensor_size) == 0
    return context.reducer is not None and num_rows >= LEAST_ROWS_TO_SPLIT and even


def share_of(num_rows: int, context: ParallelContext) -> slice:
    """This tensor rank's rows, out of as many equal shares as there are ranks. `num_rows` must be a multiple of
    tensor_size."""
    assert num_rows % context.tensor_size == 0, f"{num_rows} rows for {context.tensor_size} ranks"
    return rows_of_rank(num_rows, context.tensor_rank, context.tensor_size)


def largest(x: Tensor, context: ParallelContext) -> Tensor:
    """The largest of every tensor rank's x, element by element."""
    return x if context.tensor_size == 1 else _parts(x, context).amax(0)


def _parts(x: Tensor, context: ParallelContext) -> Tensor:
    """Every tensor rank's x: [tensor_size, *x.shape]."""
    parts = x.new_empty((context.tensor_size * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x.contiguous(), group=context.group)
    return parts.view(context.tensor_size, *x.shape)


def of_first(x: Tensor, context: ParallelContext) -> Tensor:
    """The first tensor rank's x on all of them, in place."""
    if context.tensor_size > 1:
        dist.broadcast(x, group=context.group, group_src=0)
    return x


def agree_on_min(value: int, context: ParallelContext) -> int:
    """The least value of all ranks. On the host: it waits for the others."""
    if context.world is None:
        return value
    found = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=context.world)
    return int(found)
