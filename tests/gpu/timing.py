"""How the scripts of this folder time GPU work."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from raylm.layers.slots import PatchForm

COLD_BYTES = 512 << 20
"""Inputs of this size in all take turns, so that no call finds its own in the L2 cache."""
REPLAYS = 15

Call = Callable[[], object]


def add_kinds(parser: argparse.ArgumentParser, default: str) -> None:
    """Arguments that say which weights in patches are timed (`kinds`, PatchForms), and of which shapes."""
    help_of_kinds = "numbers and columns of a group, with commas between"
    parser.add_argument("--kinds", type=_forms, default=_forms(default), help=help_of_kinds)
    parser.add_argument("--shapes", default="", help="only those whose name begins so")


def _forms(text: str) -> list[PatchForm]:
    return [PatchForm(numbers, int(group)) for numbers, group in (kind.split(":") for kind in text.split(","))]


def cold_copies(size: int) -> int:
    """How many inputs of so many bytes take turns."""
    return max(2, -(-COLD_BYTES // size))


def graph_us(calls: list[Call]) -> float:
    """Of one call, in a CUDA graph of many that follow each other; the median of replays, each behind another one."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), len(calls) * -(-12 // len(calls))
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / count)
    return statistics.median(times[3:])


def bandwidth() -> float:
    """Bytes in a microsecond, of a kernel that reads and writes much."""
    source = torch.randn(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_us([lambda: torch.neg(source, out=target)])
