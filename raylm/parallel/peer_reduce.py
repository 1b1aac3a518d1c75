"""Sums over the GPUs of one host, the norms that follow them, and gathers, by kernels over the other GPUs' memory.

A process group's all-reduce takes as long for 4 KB as for 64: it waits, not copies. Here one kernel stages, meets the
other ranks by flags in their memory and reads (cuda_ext/include/raylm/cuda/peer.cuh). It launches without the host's
help, so it may be captured in CUDA graphs. Where there are many rows, a sum and its norm are split between the ranks;
outside of graphs a product of 1,024 rows a rank or more sends the other ranks' rows while it computes this rank's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from raylm import ops
from raylm.parallel.context import Sent, rows_of_rank
from raylm.parallel.peer_windows import SharedWindows, connect_windows

MAX_NORM_ROW_BYTES = 32 * 1024
LEAST_SENT_SHARE = 1024
"""The fewest rows a rank's share may have to be sent: smaller products fill a GPU less and launch as many kernels."""
_KIB = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Bytes of a tensor up to which one shot is the fastest, then two shots; past both, the process group is."""

    one_shot: int
    two_shot: int

    @classmethod
    def measured(cls, ranks: int) -> SizeLimits:
        """By `raylm bench all-reduce` on H200s, 2 and 4 of them; for more the sizes are a guess. Between two GPUs both
        shots read the same bytes, and one waits less."""
        if ranks == 2:
            return cls(8192 * _KIB, 0)
        return cls(1024 * _KIB if ranks <= 4 else 256 * _KIB, 8192 * _KIB)

    @property
    def most(self) -> int:
        return max(self.one_shot, self.two_shot)


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """Norms that the ranks split between them: of `least_rows` to `most_rows` rows of at most `row_bytes` each."""

    most_rows: int
    row_bytes: int
    least_rows: int = 512

    def takes(self, rows: int, row_bytes: int) -> bool:
        return (
            self.least_rows <= rows <= self.most_rows
            and 0 < row_bytes <= min(self.row_bytes, MAX_NORM_ROW_BYTES)
            and row_bytes % 16 == 0
        )

    def capacity(self, ranks: int) -> int:
        """Bytes of a slot of each rank's window: the shares of the other ranks. 0 where it takes no norm."""
        if not self.takes(self.most_rows, self.row_bytes):
            return 0
        return (ranks - 1) * -(-self.most_rows // ranks) * self.row_bytes


class _Split(NamedTuple):
    limits: SplitLimits
    windows: SharedWindows


class PeerReducer:
    """One rank's end of the sums and gathers of a group of ranks. `connect_peers` makes it, on all ranks together.

    All ranks make the same calls, with tensors of the same shape, in the same order on one stream (or on streams that
    events put in order). `takes`, `takes_norm`, `takes_gather` and `sends` depend on shape, layout, and whether a graph
    is captured alone, so they say the same on every rank.
    """

    def __init__(
        self,
        windows: SharedWindows,
        *,
        limits: SizeLimits,
        limit_s: float,
        split: tuple[SplitLimits, SharedWindows] | None = None,
        cells: SharedWindows | None = None,
    ) -> None:
        """`windows` are for sums and gathers, of `limits.most` bytes; those of `split` for the norms that it names;
        `cells` for the kernel that takes few rows through all layers."""
        self.limits = limits
        self._windows = windows
        self._limit_s = limit_s
        self._split = None if split is None else _Split(*split)
        self._cells = cells
        self._copies = torch.cuda.Stream(windows.device)
        """The stream of the copies to other ranks, which run beside products."""
        self._num_sent = 0

    @property
    def cells(self) -> ops.PeerCells | None:
        """What ops.few_layers sums over the ranks by."""
        cells = self._cells
        return None if cells is None else ops.PeerCells(cells.addresses, cells.rank, cells.capacity, self._limit_s)

    def takes(self, x: Tensor) -> bool:
        """Whether x can be summed here, and faster than by the process group."""
        return x.nbytes <= self.limits.most and x.dtype in _DTYPES and self._reads(x)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in place and equal in every bit on all ranks. Only for an x that it `takes`.

        It only queues work. A rank that waits for another one longer than the limit given to `connect_peers` loses its
        CUDA context: the next call that looks at the device raises RuntimeError.
        """
        windows, two_shot = self._windows, x.nbytes > self.limits.one_shot
        ops.peer_all_reduce(x, windows.addresses, windows.rank, windows.capacity, self._limit_s, two_shot=two_shot)
        return x

    def takes_gather(self, x: Tensor) -> bool:
        """Whether x [T, n] can be gathered here, on two H200s faster than by the process group."""
        fits = x.dim() == 2 and x.shape[1] * x.itemsize <= self._from_each
        return fits and self._reads(x) and self._has_vectors(x)

    def gather(self, x: Tensor, *, split: bool = False) -> Tensor:
        """As ops.peer_all_gather; only for an x that it `takes_gather`."""
        windows = self._windows
        return ops.peer_all_gather(x, windows.addresses, windows.rank, windows.capacity, self._limit_s, split=split)

    def takes_norm(self, x: Tensor, residual: Tensor) -> bool:
        """Whether add_rms_norm can do x and residual [T, H], faster than a sum and a norm."""
        return (
            self._reads(x)
            and x.dtype in _DTYPES
            and self._has_vectors(x)
            and (self._norms_at_once(x) or self._splits(x))
            and residual.is_contiguous()
            and residual.data_ptr() % 16 == 0
        )

    def sends(self, rows: int, row_bytes: int) -> bool:
        """Whether `send` takes a product of so many rows of row_bytes each. Never while a graph is captured: `send`
        numbers sums on the host."""
        split, many = self._split, rows >= LEAST_SENT_SHARE * self._windows.ranks
        takes = split is not None and many and split.limits.takes(rows, row_bytes)
        return takes and not torch.cuda.is_current_stream_capturing()

    def send(self, product: Callable[[slice], Tensor], rows: int) -> Sent:
        """Compute `product`, which maps a slice of the `rows` rows to their product, share by share: the other ranks'
        first, each copied to its rank while the next is computed, this rank's last. Only where it `sends`; the result
        is for add_rms_norm."""
        assert self._split is not None, "only where norms are split"
        windows, self._num_sent = self._split.windows, self._num_sent + 1
        compute, copies = torch.cuda.current_stream(windows.device), self._copies
        parts = []
        for other in range(windows.rank + 1, windows.rank + windows.ranks):
            to = other % windows.ranks
            parts.append(product(rows_of_rank(rows, to, windows.ranks)))
            copies.wait_stream(compute)
            with torch.cuda.stream(copies):
                ops.peer_send_rows(
                    parts[-1],
                    to=to,
                    rows=rows,
                    windows=windows.addresses,
                    rank=windows.rank,
                    capacity=windows.capacity,
                    number=self._num_sent,
                )
        return Sent(product(rows_of_rank(rows, windows.rank, windows.ranks)), self._num_sent, tuple(parts))

    def add_rms_norm(self, x: Tensor | Sent, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, H] += the sum of every rank's x [T, H] in place; returns the norm of the new residual, which has
        the same bits on all ranks.

        Only for an x and a residual that it `takes_norm`; the residual is the same on all ranks. In one kernel, where
        a sum and a norm take two. Of many rows each rank has its share, always the same one of as many rows: only there
        is its residual changed, and does it have to be right.
        """
        if isinstance(x, Sent):
            assert self._split is not None, "only where norms are split"
            windows = self._split.windows
            # This rank's flags must be raised before its norm starts. The norm spins on the peers' flags, and kernels
            # launched early behind it may fill the GPU: the one that raises a flag would not run, and both would wait.
            torch.cuda.current_stream(windows.device).wait_stream(self._copies)
            place = (windows.addresses, windows.rank, windows.capacity)
            return ops.peer_sent_add_rms_norm(x.own, residual, weight, eps, *place, self._limit_s, x.number)
        norm, windows = ops.peer_add_rms_norm, self._windows
        if self._split is not None and self._splits(x):
            norm, windows = ops.peer_split_add_rms_norm, self._split.windows
        return norm(x, residual, weight, eps, windows.addresses, windows.rank, windows.capacity, self._limit_s)

    def close(self) -> None:
        """As SharedWindows.close."""
        self._windows.close()
        if self._split is not None:
            self._split.windows.close()
        if self._cells is not None:
            self._cells.close()

    def _reads(self, x: Tensor) -> bool:
        return (
            x.nbytes > 0
            and x.nbytes % 16 == 0
            and x.device == self._windows.device
            and x.is_contiguous()
            and x.data_ptr() % 16 == 0
        )

    def _norms_at_once(self, x: Tensor) -> bool:
        """Whether every rank may norm all rows of x: where the ranks sum it in one shot."""
        most = min(self.limits.one_shot, self._from_each)
        return x.nbytes <= most and x.shape[1] * x.itemsize <= MAX_NORM_ROW_BYTES

    @property
    def _from_each(self) -> int:
        """Bytes that a window has place for from each of the other ranks."""
        return self._windows.capacity // (self._windows.ranks - 1)

    def _has_vectors(self, x: Tensor) -> bool:
        """Whether each row of x begins where 16 bytes do."""
        return x.shape[-1] * x.itemsize % 16 == 0

    def _splits(self, x: Tensor) -> bool:
        """Whether each rank norms its share of the rows of x."""
        return self._split is not None and self._split.limits.takes(len(x), x.shape[1] * x.itemsize)


def connect_peers(
    group: ProcessGroup,
    device: torch.device,
    *,
    limit_s: float,
    limits: SizeLimits | None = None,
    split: SplitLimits | None = None,
    cells_hidden_size: int = 0,
) -> tuple[PeerReducer | None, str]:
    """A reducer over the ranks of `group` (gloo), each of which calls this with its GPU; or None on all, and why.

    A rank that waits in a sum for another one longer than `limit_s` seconds fails: it has to cover the time by which
    one rank may lag behind, as in a warm-up. Each rank allocates twice `limits.most` bytes, twice the capacity of
    `split`, and cells for rows of `cells_hidden_size` elements. Without `split`, or where that memory is not to be had,
    no norm is split; likewise there are no cells.
    """
    ranks = dist.get_world_size(group)
    limits = limits or SizeLimits.measured(ranks)
    windows, reason = connect_windows(group, device, limits.most)
    if windows is None:
        return None, reason
    splits, cells = None, None
    capacity = 0 if split is None else split.capacity(ranks)
    if split is not None and capacity:
        others, problem = connect_windows(group, device, capacity)
        if others is None:
            reason = f"{reason}; norms are not split: {problem}"
        else:
            splits = (split, others)
            reason = f"{reason}; norms of {split.least_rows} to {split.most_rows} rows are split"
    if cells_hidden_size:
        cells, problem = connect_windows(group, device, ops.peer_cells_bytes(cells_hidden_size, ranks))
        if cells is None:
            reason = f"{reason}; few rows go layer by layer: {problem}"
    return PeerReducer(windows, limits=limits, limit_s=limit_s, split=splits, cells=cells), reason
