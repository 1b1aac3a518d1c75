"""What a sum over the GPUs of this host costs, by size: one shot and two shots over peer memory, and NCCL."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from raylm.bench.report import AllReduceResult
from raylm.errors import ConfigError, RaylmError
from raylm.parallel.peer_reduce import MAX_RANKS, SizeLimits, connect_peers

Reduce = Callable[[Tensor], object]

DEFAULT_SIZES = [4096 << doubling for doubling in range(12)]
"""Bytes: 4 KiB to 8 MiB."""
_CALLS = 100
_REPLAYS = 20
_LIMIT_S = 60.0
_TIMEOUT = timedelta(seconds=120)


def measure_all_reduce(ranks: int | None, sizes: Sequence[int]) -> list[AllReduceResult]:
    """One result a size in bytes of bfloat16, from processes of its own, one a GPU; all GPUs where `ranks` is None.

    A figure is the median over replays of a CUDA graph of 100 calls, divided by them, on the slowest rank. Raises
    ConfigError where there are too few GPUs, RaylmError where they share no memory.
    """
    found = torch.cuda.device_count()
    ranks = min(found, MAX_RANKS) if ranks is None else ranks
    if not 2 <= ranks <= min(found, MAX_RANKS):
        raise ConfigError(f"all-reduce needs 2 to {MAX_RANKS} GPUs: --ranks is {ranks}, and torch sees {found}")
    if wrong := [size for size in sizes if size <= 0 or size % 16]:
        raise ConfigError(f"--sizes has {wrong[0]}; a size must be a positive multiple of 16 bytes")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results: SimpleQueue[list[AllReduceResult] | str] = context.SimpleQueue()
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_measure, args=(rank, ranks, list(sizes), store, results), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise RaylmError("a rank of the benchmark failed; its traceback is above")
    answer = results.get()
    if isinstance(answer, str):
        raise RaylmError(f"the GPUs share no memory: {answer}")
    return answer


def _measure(
    rank: int, ranks: int, sizes: list[int], store: str, results: SimpleQueue[list[AllReduceResult] | str]
) -> None:
    """One rank; rank 0 brings the results."""
    # NCCL knows no other switch for multicast over NVLink, which raylm leaves off.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=device, timeout=_TIMEOUT
    )
    cpu = dist.new_group(backend="gloo")
    most = max(sizes)
    one, reason = connect_peers(cpu, device, limit_s=_LIMIT_S, limits=SizeLimits(most, 0))
    two, _ = connect_peers(cpu, device, limit_s=_LIMIT_S, limits=SizeLimits(0, most))
    if one is None or two is None:
        answer: list[AllReduceResult] | str = reason
    else:
        answer = [
            AllReduceResult("all-reduce", ranks, size, *_us(size, cpu, one, two, dist.all_reduce)) for size in sizes
        ]
        one.close()
        two.close()
    if rank == 0:
        results.put(answer)
    dist.destroy_process_group()


def _us(size: int, cpu: dist.ProcessGroup, *ways: Reduce) -> list[float]:
    """Microseconds a call, each way, on the slowest rank."""
    own = [_us_of(way, size, cpu) for way in ways]
    all_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(all_ranks, own, group=cpu)
    return [max(times) for times in zip(*all_ranks, strict=True)]


def _us_of(reduce: Reduce, size: int, cpu: dist.ProcessGroup) -> float:
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
    reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            reduce(x)
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        torch.cuda.synchronize()
        dist.barrier(cpu)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # The first one waits for the rank that comes last.
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1000 / _CALLS)
    return statistics.median(times)
