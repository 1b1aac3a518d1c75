"""How the ranks of one host come to read and write each other's GPU memory."""

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

from raylm.log import get_logger
from raylm.ops import peer_memory
from raylm.ops.peer_memory import PeerWindow, Window

Item = TypeVar("Item")

MAX_RANKS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FREE_TIMEOUT = timedelta(seconds=10)

logger = get_logger(__name__)


class SharedWindows:
    """A window on each rank of a group, open on all of them. `connect_windows` makes it, on all ranks together."""

    def __init__(self, group: ProcessGroup, own: Window, peers: dict[int, PeerWindow], *, capacity: int) -> None:
        """`peers` has the window of every rank but this one; each has two slots of `capacity` bytes."""
        self._group = group
        self._own = own
        self._peers = peers
        self.capacity = capacity
        self.rank = dist.get_rank(group)
        self.ranks = len(peers) + 1
        self.device = torch.device("cuda", own.device)
        opened = {rank: window.address for rank, window in peers.items()} | {self.rank: own.address}
        self.addresses: Tensor = torch.tensor([opened[rank] for rank in sorted(opened)], dtype=torch.int64)
        """In the order of ranks, as the operators take them."""
        self._closed = False

    def close(self) -> None:
        """Give the memory back, on all ranks together; graphs that hold calls must not run any more. Where a rank or
        the CUDA context is gone, the end of the process does it."""
        if self._closed:
            return
        self._closed = True
        try:
            torch.cuda.synchronize(self.device)
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


def connect_windows(group: ProcessGroup, device: torch.device, capacity: int) -> tuple[SharedWindows | None, str]:
    """Windows of the ranks of `group` (gloo), each of which calls this with its GPU; or None on all, and why.

    Each rank allocates twice `capacity` bytes, a multiple of 16.
    """
    ranks = dist.get_world_size(group)
    if not 2 <= ranks <= MAX_RANKS:
        return None, f"the group has {ranks} ranks; peer memory serves 2 to {MAX_RANKS}"
    own, offer = _offer(device, capacity)
    offers = _all_gather(offer, group)
    reason = _obstacle(offers)
    peers: dict[int, PeerWindow] = {}
    if reason is None and own is not None:
        problem = _open_all(offers, dist.get_rank(group), own.device, peers)
        reason = _first_problem(_all_gather(problem, group))
    if reason is None and own is not None:
        return SharedWindows(group, own, peers, capacity=capacity), f"{ranks} ranks share memory"
    _disconnect(group, own, peers)
    return None, reason or "this rank has no window"


def _offer(device: torch.device, capacity: int) -> tuple[Window | None, _Offer]:
    host = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    if device.type != "cuda":
        return None, _Offer(host, "", b"", f"its device is {device}, not a GPU")
    index = torch.cuda.current_device() if device.index is None else device.index
    if (problem := peer_memory.missing(index)) is not None:
        return None, _Offer(host, "", b"", problem)
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
