"""Processes for tests of what ranks do together: each runs the functions that it is sent, one after another."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist

_TIMEOUT_S = 120


def process_context() -> BaseContext:
    """Starts processes for ranks. They are forked from one server that has imported torch and raylm once in the
    session, which costs a process of its own 4 s; where there is CUDA, which survives no fork, each is a new one."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "raylm.worker.worker"])
    return context


class Ranks:
    """`count` processes, each on the GPU of its number where there is one; several are a gloo group."""

    def __init__(self, count: int, folder: Path) -> None:
        context = process_context()
        pipes = [context.Pipe() for _ in range(count)]
        self._ends = [end for end, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, count, folder / "store", there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, there in pipes:
            there.close()

    def run(self, check: Callable[..., object], *args: object) -> list[object]:
        """check(rank, *args) on all ranks at once; returns what each returns. Raises AssertionError with tracebacks."""
        for end in self._ends:
            end.send((check, args))
        deadline = monotonic() + _TIMEOUT_S
        answers = [self._answer(rank, deadline) for rank in range(len(self._ends))]
        if failures := [answer for failed, answer in answers if failed]:
            raise AssertionError("\n".join(map(str, failures)))
        return [answer for _, answer in answers]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()

    def _answer(self, rank: int, deadline: float) -> tuple[bool, object]:
        end = self._ends[rank]
        if not end.poll(max(0.0, deadline - monotonic())):
            return True, f"rank {rank} did not answer within {_TIMEOUT_S} s"
        try:
            failed, answer = end.recv()
        except EOFError:
            return True, f"rank {rank} ended"
        return failed, answer


def _serve(rank: int, count: int, store: Path, end: Connection) -> None:
    if rank < torch.cuda.device_count():
        torch.cuda.set_device(rank)
    if count > 1:
        timeout = timedelta(seconds=_TIMEOUT_S / 2)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timeout)
    while (task := _receive(end)) is not None:
        check, args = task
        try:
            end.send((False, check(rank, *args)))
        except BaseException:
            end.send((True, f"rank {rank}:\n{traceback.format_exc()}"))


def _receive(end: Connection) -> tuple[Callable[..., object], Sequence[object]] | None:
    try:
        task: tuple[Callable[..., object], Sequence[object]] = end.recv()
    except EOFError:
        return None
    return task
