"""Sums, norms and gathers over memory that the GPUs of a host share, which raylm.parallel.peer_reduce sets up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raylm.ops import extension, library  # noqa: F401  (registers the schemas)

_peer_all_reduce: Callable[..., None] = torch.ops.raylm.peer_all_reduce.default
_peer_all_gather: Callable[..., Tensor] = torch.ops.raylm.peer_all_gather.default
_peer_add_rms_norm: Callable[..., Tensor] = torch.ops.raylm.peer_add_rms_norm.default
_peer_send_rows: Callable[..., None] = torch.ops.raylm.peer_send_rows.default
_peer_sent_add_rms_norm: Callable[..., Tensor] = torch.ops.raylm.peer_sent_add_rms_norm.default
_peer_split_add_rms_norm: Callable[..., Tensor] = torch.ops.raylm.peer_split_add_rms_norm.default


def peer_all_reduce(
    x: Tensor, windows: Tensor, rank: int, capacity: int, limit_s: float, *, two_shot: bool = False
) -> None:
    """x = the sum of every rank's x, in place: the same bits on every rank, from either kind of shot.

    Every rank calls it with a contiguous x of the same shape (a multiple of 16 bytes, at most `capacity`), in the same
    order on one stream. `windows` (int64 [ranks], on the CPU) are the addresses of the ranks' windows, each of
    `capacity` bytes (raylm.ops.peer_memory), in the order of ranks. A rank that waits for another one longer than
    limit_s fails: its CUDA context is lost. On CUDA with the compiled extension only;
    raylm.parallel.peer_reduce.PeerReducer sets all of it up.
    """
    _peer_all_reduce(x, windows, rank, capacity, limit_s, two_shot)


def peer_all_gather(
    x: Tensor, windows: Tensor, rank: int, capacity: int, limit_s: float, *, split: bool = False
) -> Tensor:
    """Every rank's x [T, n] side by side, in the order of ranks: [T, n * ranks]. With `split`, rank r gets only the
    T / ranks rows from r * T / ranks on.

    Called like peer_all_reduce, with the same windows. x is contiguous, of any type; a row is a multiple of 16 bytes,
    at most capacity / (ranks - 1). Rows that do not fit a window together take several launches.
    """
    return _peer_all_gather(x, windows, rank, capacity, limit_s, split)


def peer_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    windows: Tensor,
    rank: int,
    capacity: int,
    limit_s: float,
) -> Tensor:
    """residual [T, H] += the sum of every rank's x [T, H], in place; returns the norm of the new residual.

    As peer_all_reduce and add_rms_norm one after the other, for rows of a multiple of 16 bytes, up to 32 KiB. x itself
    stays as it is. `capacity` is at least (ranks - 1) times the bytes of x.
    """
    return _peer_add_rms_norm(x, residual, weight, eps, windows, rank, capacity, limit_s)


def peer_split_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    windows: Tensor,
    rank: int,
    capacity: int,
    limit_s: float,
) -> Tensor:
    """As peer_add_rms_norm for any number of rows T, of which each rank norms its share and gives it to the others.

    Rank r of n owns the rows T * r // n up to T * (r + 1) // n, and only their residual is changed: what it holds of
    other rows is not read. The norm has all rows, with the same bits on every rank. `windows` are not those of other
    operators, and `capacity` covers (n - 1) shares of the most rows that a rank owns, ceil(T / n).
    """
    return _peer_split_add_rms_norm(x, residual, weight, eps, windows, rank, capacity, limit_s)


def peer_send_rows(x: Tensor, *, to: int, rows: int, windows: Tensor, rank: int, capacity: int, number: int) -> None:
    """Send rank `to` this rank's x of the rows that it owns (peer_split_add_rms_norm) of `rows`, by a copy engine: no
    multiprocessor is kept from a product that runs meanwhile, on another stream. For peer_sent_add_rms_norm, whose
    windows these are.

    `number` counts the sums, from 1 on: the same one for all ranks of a sum. The stream of a sum's norm may not come to
    the next sum's sending before the norm has ended.
    """
    _peer_send_rows(x, to, rows, windows, rank, capacity, number)


def peer_sent_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    windows: Tensor,
    rank: int,
    capacity: int,
    limit_s: float,
    number: int,
) -> Tensor:
    """As peer_split_add_rms_norm, but x has only the rows that this rank owns. The ranks' parts of each other's rows
    come by peer_send_rows with the same number, and the kernel waits for those of this rank's."""
    return _peer_sent_add_rms_norm(x, residual, weight, eps, windows, rank, capacity, limit_s, number)
