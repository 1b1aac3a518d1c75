"""From ranks that know nothing of each other to process groups: NCCL between GPUs, gloo between hosts."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore

from raylm.config.engine import ParallelConfig
from raylm.log import get_logger
from raylm.parallel.context import ParallelContext, Reducer
from raylm.parallel.peer_reduce import SplitLimits, connect_peers
from raylm.parallel.stages import StageLinks

_SIOCGIFADDR = 0x8915

logger = get_logger(__name__)


class Seat(NamedTuple):
    """What one rank is told of its place: its number, its node's address, and where the ranks meet (host:port)."""

    rank: int
    node_ip: str
    meeting_point: str
    visible_gpus: list[str] = []
    """The GPUs of this model's ranks on this node: each rank sees all of them, so that they can read each other's
    memory. Empty leaves what is visible as it is."""
    gpu: int = 0
    """Which of them is this rank's."""


class MeetingPoint:
    """A key-value store on a free port of one node's own address, where ranks find each other. Close it with the last
    reference to it."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
            listener.listen(1024)
            port = listener.getsockname()[1]
            # The store takes the socket over; its own would listen on every interface.
            self._store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )
        self.address = f"{host}:{port}"


def connect(
    parallel: ParallelConfig,
    seat: Seat,
    device: torch.device,
    *,
    timeout_s: float,
    split: SplitLimits | None = None,
    hidden_size: int = 0,
    deterministic: bool = False,
) -> ParallelContext:
    """Join the others and make the groups. Every rank calls this once; it waits for all of them, up to `timeout_s`.

    Collectives wait up to `timeout_s` too: that ranks load for different lengths of time is no fault. `split` names
    the norms that tensor ranks may split between them, `hidden_size` the length of the rows that they may take through
    all layers in one kernel (0: none). With `deterministic` no kernel sums that picks an order by size.
    """
    host, _, port = seat.meeting_point.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    tensor, stages = parallel.tensor, parallel.pipeline
    stage, tensor_rank = divmod(seat.rank, tensor)
    set_up_libraries(parallel, seat.node_ip)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=TCPStore(host, int(port), is_master=False, timeout=timeout),
        rank=seat.rank,
        world_size=tensor * stages,
        timeout=timeout,
    )
    # Every rank makes all groups, in the same order, those that it is not part of as well.
    groups = [_group(range(first, first + tensor)) for first in range(0, tensor * stages, tensor)]
    host_groups: list[ProcessGroup | None] = [None] * stages
    if device.type == "cuda" and parallel.custom_all_reduce and not deterministic:
        host_groups = [_group(range(first, first + tensor), "gloo") for first in range(0, tensor * stages, tensor)]
    columns = [list(range(first, tensor * stages, tensor)) for first in range(tensor)]
    onward = [_group(column) for column in columns]
    back = [_group(column) for column in columns]
    links = None
    if stages > 1:
        column_onward, column_back = onward[tensor_rank], back[tensor_rank]
        assert column_onward is not None and column_back is not None
        links = StageLinks(columns[tensor_rank], stage, onward=column_onward, back=column_back, device=device)
    # A stage hands its residual on: with split norms, no rank would have all rows of it. And a kernel that waits for
    # another stage may run beside this one's: it would keep a block of the kernel of all layers out, which needs all of
    # the GPU, and other ranks would wait for that.
    in_one_stage = (split, hidden_size) if stages == 1 else (None, 0)
    return ParallelContext(
        rank=seat.rank,
        tensor_rank=tensor_rank,
        tensor_size=tensor,
        pipeline_rank=stage,
        pipeline_size=stages,
        device=device,
        group=groups[stage],
        world=dist.group.WORLD,
        reducer=_reducer(host_groups[stage], device, timeout_s, *in_one_stage),
        links=links,
        stage_layers=tuple(parallel.stage_layers) if parallel.stage_layers is not None else None,
        deterministic=deterministic,
    )


def _group(ranks: range | list[int], backend: str | None = None) -> ProcessGroup | None:
    """A group of these ranks; None for one alone. On ranks outside of it, what is returned is not to be used."""
    if len(ranks) < 2:
        return None
    group: ProcessGroup = dist.new_group(list(ranks), backend=backend)
    return group


def _reducer(
    group: ProcessGroup | None, device: torch.device, timeout_s: float, split: SplitLimits | None, hidden_size: int
) -> Reducer | None:
    """The kernels for sums and norms, where the GPUs of the tensor `group` (gloo) can run them."""
    if group is None:
        return None
    reducer, reason = connect_peers(group, device, limit_s=timeout_s, split=split, cells_hidden_size=hidden_size)
    logger.info("sums over tensor ranks: %s (%s)", "raylm's kernel and NCCL" if reducer else "NCCL", reason)
    return reducer


def set_up_libraries(parallel: ParallelConfig, node_ip: str) -> None:
    """NCCL and gloo are told through the environment alone; what a user has set there wins, but for multicast."""
    os.environ["NCCL_NVLS_ENABLE"] = "1" if parallel.multicast else "0"
    interface = interface_of(node_ip)
    if interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:
                continue  # It has no IPv4 address.
            if socket.inet_ntoa(found) == address:
                return name
    return None
