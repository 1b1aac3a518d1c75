"""What a sum over the GPUs of this host costs, by size: one shot and two shots over peer memory, and NCCL; and what it
costs with the norm that follows, and to gather logits, by rows."""

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

from raylm import ops
from raylm.bench.report import AllReduceResult, GatherResult, SumNormResult
from raylm.errors import ConfigError, RaylmError
from raylm.parallel.collectives import all_gather
from raylm.parallel.context import ParallelContext
from raylm.parallel.peer_reduce import PeerReducer, SizeLimits, SplitLimits, connect_peers
from raylm.parallel.peer_windows import MAX_RANKS

Reduce = Callable[[Tensor], object]
Results = list[AllReduceResult | GatherResult | SumNormResult]

DEFAULT_SIZES = [4096 << doubling for doubling in range(12)]
"""Bytes: 4 KiB to 8 MiB."""
DEFAULT_ROWS = [1, 32, 128, 256, 512, 1024, 2048, 8192]
_HIDDEN = 4096
_VOCAB = 128_256
_MOST_LOGIT_ROWS = 1024
_CALLS = 100
_REPLAYS = 20
_LIMIT_S = 60.0
_TIMEOUT = timedelta(seconds=120)


def measure_all_reduce(ranks: int | None, sizes: Sequence[int], rows: Sequence[int]) -> Results:
    """One result a size in bytes of bfloat16 and one a number of rows of 4,096, up to 1,024 of them of logits too, from
    processes of its own, one a GPU.

    All GPUs where `ranks` is None. A figure is the median over replays of a CUDA graph of 100 calls, divided by them,
    on the slowest rank. Raises ConfigError where there are too few GPUs, RaylmError where they share no memory.
    """
    found = torch.cuda.device_count()
    ranks = min(found, MAX_RANKS) if ranks is None else ranks
    if not 2 <= ranks <= min(found, MAX_RANKS):
        raise ConfigError(f"all-reduce needs 2 to {MAX_RANKS} GPUs: --ranks is {ranks}, and torch sees {found}")
    if wrong := [size for size in sizes if size <= 0 or size % 16]:
        raise ConfigError(f"--sizes has {wrong[0]}; a size must be a positive multiple of 16 bytes")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results: SimpleQueue[Results | str] = context.SimpleQueue()
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_measure, args=(rank, ranks, list(sizes), list(rows), store, results), daemon=True)
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
    rank: int, ranks: int, sizes: list[int], rows: list[int], store: str, results: SimpleQueue[Results | str]
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
    answer: Results | str = _sums(sizes, cpu, device)
    if isinstance(answer, list):
        answer += _norms(rows, cpu, device)
        answer += _gathers([number for number in rows if number <= _MOST_LOGIT_ROWS], cpu, device)
    if rank == 0:
        results.put(answer)
    dist.destroy_process_group()


def _sums(sizes: list[int], cpu: dist.ProcessGroup, device: torch.device) -> Results | str:
    most, ranks = max(sizes), dist.get_world_size()
    one, reason = connect_peers(cpu, device, limit_s=_LIMIT_S, limits=SizeLimits(most, 0))
    two, _ = connect_peers(cpu, device, limit_s=_LIMIT_S, limits=SizeLimits(0, most))
    if one is None or two is None:
        return reason
    results: Results = []
    for size in sizes:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        results.append(AllReduceResult("all-reduce", ranks, size, *_us(x, cpu, one, two, dist.all_reduce)))
    one.close()
    two.close()
    return results


def _norms(rows: list[int], cpu: dist.ProcessGroup, device: torch.device) -> Results:
    ranks = dist.get_world_size()
    most = max(rows)
    once = _connected(cpu, device, SizeLimits((ranks - 1) * most * 2 * _HIDDEN, 0), None)
    split = _connected(cpu, device, None, SplitLimits(most, 2 * _HIDDEN, least_rows=1))
    weight = torch.ones(_HIDDEN, dtype=torch.bfloat16, device=device)
    results: Results = []
    for number in rows:
        x = torch.zeros(number, _HIDDEN, dtype=torch.bfloat16, device=device)
        results.append(SumNormResult("sum-norm", ranks, number, *_us(x, cpu, *_norm_ways(once, split, weight, x))))
    once.close()
    split.close()
    return results


def _connected(
    cpu: dist.ProcessGroup, device: torch.device, limits: SizeLimits | None, split: SplitLimits | None
) -> PeerReducer:
    reducer, reason = connect_peers(cpu, device, limit_s=_LIMIT_S, limits=limits, split=split)
    if reducer is None or (split is not None and "norms are not split" in reason):
        raise RaylmError(reason)
    return reducer


def _gathers(rows: list[int], cpu: dist.ProcessGroup, device: torch.device) -> Results:
    ranks = dist.get_world_size()
    reducer, columns = _connected(cpu, device, None, None), -(-_VOCAB // ranks // 8) * 8
    rank = dist.get_rank()
    context = ParallelContext(rank, rank, ranks, 0, 1, device)  # without a reducer, so that NCCL gathers
    results: Results = []
    for number in rows:
        x = torch.zeros(number, columns, dtype=torch.bfloat16, device=device)
        results.append(
            GatherResult("all-gather", ranks, number, *_us(x, cpu, lambda x: all_gather(x, context), reducer.gather))
        )
    reducer.close()
    return results


def _norm_ways(once: PeerReducer, split: PeerReducer, weight: Tensor, x: Tensor) -> tuple[Reduce, ...]:
    residual = torch.zeros_like(x)

    def behind(reduce: Reduce) -> Reduce:
        def both(x: Tensor) -> None:
            reduce(x)
            ops.add_rms_norm(x, residual, weight, 1e-6)

        return both

    def norm(reducer: PeerReducer) -> Reduce:
        return lambda x: reducer.add_rms_norm(x, residual, weight, 1e-6)

    apart = split if split.takes(x) else dist.all_reduce
    return behind(dist.all_reduce), behind(apart), norm(once), norm(split)


def _us(x: Tensor, cpu: dist.ProcessGroup, *ways: Reduce) -> list[float]:
    """Microseconds a call, each way, on the slowest rank."""
    own = [_us_of(way, x, cpu) for way in ways]
    all_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(all_ranks, own, group=cpu)
    return [max(times) for times in zip(*all_ranks, strict=True)]


def _us_of(reduce: Reduce, x: Tensor, cpu: dist.ProcessGroup) -> float:
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
