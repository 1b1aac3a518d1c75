"""Sums of small tensors over the GPUs of one host, by kernels that read the other GPUs' memory.

A process group's all-reduce takes as long for 4 KB as for 64: it waits, not copies. Here one kernel stages, meets the
other ranks by flags in their memory and reads (cuda_ext/include/raylm/cuda/peer.cuh). It launches without the host's
help, so it may be captured in CUDA graphs.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from raylm import ops
from raylm.log import get_logger
from raylm.ops import peer_memory
from raylm.ops.peer_memory import PeerWindow, Window

Item = TypeVar("Item")

MAX_RANKS = 8
MAX_NORM_ROWS = 64
MAX_NORM_ROW_BYTES = 32 * 1024
_KIB = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FREE_TIMEOUT = timedelta(seconds=10)

logger = get_logger(__name__)


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


class PeerReducer:
    """One rank's end of the sums of a group of ranks. `connect_peers` makes it, on all ranks together.

    All ranks make the same calls, with tensors of the same shape, in the same order on one stream (or on streams that
    events put in order). `takes` depends on shape and layout alone, so it says the same on every rank.
    """

    def __init__(
        self,
        group: ProcessGroup,
        own: Window,
        peers: dict[int, PeerWindow],
        *,
        limits: SizeLimits,
        limit_s: float,
    ) -> None:
        """`peers` has the window of every rank but this one."""
        self.limits = limits
        self._group = group
        self._own = own
        self._peers = peers
        self._limit_s = limit_s
        self._device = torch.device("cuda", own.device)
        self._rank = dist.get_rank(group)
        addresses = {rank: window.address for rank, window in peers.items()} | {self._rank: own.address}
        self._windows = torch.tensor([addresses[rank] for rank in sorted(addresses)], dtype=torch.int64)
        self._closed = False

    def takes(self, x: Tensor) -> bool:
        """Whether x can be summed here, and faster than by the process group."""
        size = x.nbytes
        return (
            0 < size <= self.limits.most
            and size % 16 == 0
            and x.dtype in _DTYPES
            and x.device == self._device
            and x.is_contiguous()
            and x.data_ptr() % 16 == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in place and equal in every bit on all ranks. Only for an x that it `takes`.

        It only queues work. A rank that waits for another one longer than the limit given to `connect_peers` loses its
        CUDA context: the next call that looks at the device raises RuntimeError.
        """
        two_shot = x.nbytes > self.limits.one_shot
        ops.peer_all_reduce(x, self._windows, self._rank, self.limits.most, self._limit_s, two_shot=two_shot)
        return x

    def takes_norm(self, x: Tensor, residual: Tensor) -> bool:
        """Whether add_rms_norm can do x and residual [T, H]."""
        return (
            self.takes(x)
            and x.nbytes <= self.limits.one_shot
            and len(x) <= MAX_NORM_ROWS
            and x[0].nbytes <= MAX_NORM_ROW_BYTES
            and x[0].nbytes % 16 == 0
            and residual.is_contiguous()
            and residual.data_ptr() % 16 == 0
        )

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual [T, H] += the sum of every rank's x [T, H] in place; returns the norm of the new residual.

        Only for an x and a residual that it `takes_norm`; the residual is the same on all ranks. In one kernel, where
        a sum and a norm take two.
        """
        return ops.peer_add_rms_norm(
            x, residual, weight, eps, self._windows, self._rank, self.limits.most, self._limit_s
        )

    def close(self) -> None:
        """Give the memory back, on all ranks together; graphs that hold calls must not run any more. Where a rank or
        the CUDA context is gone, the end of the process does it."""
        if self._closed:
            return
        self._closed = True
        try:
            torch.cuda.synchronize(self._device)
            _disconnect(self._group, self._own, self._peers)
        except RuntimeError as error:
            logger.info("Peer memory stays allocated until this process ends: %s", error)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank tells the others: its window, or why it has none."""

    host: str
    gpu: str
    handle: bytes
    problem: str | None


def connect_peers(
    group: ProcessGroup, device: torch.device, *, limit_s: float, limits: SizeLimits | None = None
) -> tuple[PeerReducer | None, str]:
    """A reducer over the ranks of `group` (gloo), each of which calls this with its GPU; or None on all, and why.

    A rank that waits in a sum for another one longer than `limit_s` seconds fails: it has to cover the time by which
    one rank may lag behind, as in a warm-up. Each rank allocates twice `limits.most` bytes.
    """
    ranks = dist.get_world_size(group)
    if not 2 <= ranks <= MAX_RANKS:
        return None, f"the group has {ranks} ranks; peer memory serves 2 to {MAX_RANKS}"
    limits = limits or SizeLimits.measured(ranks)
    own, offer = _offer(device, limits.most)
    offers = _all_gather(offer, group)
    reason = _obstacle(offers)
    peers: dict[int, PeerWindow] = {}
    if reason is None and own is not None:
        problem = _open_all(offers, dist.get_rank(group), own.device, peers)
        reason = _first_problem(_all_gather(problem, group))
    if reason is None and own is not None:
        return PeerReducer(group, own, peers, limits=limits, limit_s=limit_s), f"{ranks} ranks share memory"
    _disconnect(group, own, peers)
    return None, reason or "this rank has no window"


def _offer(device: torch.device, capacity: int) -> tuple[Window | None, _Offer]:
    host = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    if device.type != "cuda":
        return None, _Offer(host, "", b"", f"its device is {device}, not a GPU")
    if (problem := peer_memory.missing()) is not None:
        return None, _Offer(host, "", b"", problem)
    index = torch.cuda.current_device() if device.index is None else device.index
    gpu = str(torch.cuda.get_device_properties(index).uuid)
    try:
        own = Window.allocate(index, capacity)
    except RuntimeError as error:
        return None, _Offer(host, gpu, b"", str(error))
    return own, _Offer(host, gpu, own.handle, None)


def _obstacle(offers: list[_Offer]) -> str | None:
    """Why these ranks cannot share memory; the same on all of them."""
    if (problem := _first_problem([offer.problem for offer in offers])) is not None:
        return problem
    for rank, offer in enumerate(offers):
        if offer.host != offers[0].host:
            return f"rank {rank} is on another host than rank 0"
        first = [other.gpu for other in offers].index(offer.gpu)
        if first != rank:
            return f"ranks {first} and {rank} share a GPU"
    return None


def _open_all(offers: list[_Offer], own_rank: int, device: int, peers: dict[int, PeerWindow]) -> str | None:
    """Open every other rank's window into `peers`; returns what went wrong."""
    for rank, offer in enumerate(offers):
        if rank == own_rank:
            continue
        try:
            peers[rank] = PeerWindow.open(device, offer.handle)
        except RuntimeError as error:
            return f"the window of rank {rank} cannot be opened: {error}"
    return None


def _first_problem(problems: list[str | None]) -> str | None:
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None), None)


def _disconnect(group: ProcessGroup, own: Window | None, peers: dict[int, PeerWindow]) -> None:
    """A window is freed when no rank has it open any more. Raises RuntimeError when the others do not come."""
    for window in peers.values():
        window.close()
    dist.monitored_barrier(group, timeout=_FREE_TIMEOUT)
    if own is not None:
        own.free()


def _all_gather(item: Item, group: ProcessGroup) -> list[Item]:
    items = [item] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items
