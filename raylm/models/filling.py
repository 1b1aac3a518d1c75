"""Tensors of a checkpoint, copied into their slots by several threads.

A thread reads a piece, decodes it and copies it, and lets Python's lock go meanwhile. To a GPU go bytes of the file
through pinned memory, so that a thread reads the next piece while one is copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from math import prod
from typing import NamedTuple

import torch
from tqdm import tqdm

from raylm import ops
from raylm.layers.slots import Slot
from raylm.models.checkpoint import Room, Source
from raylm.models.gguf_patched import BlocksInPatches
from raylm.models.packed import MXFP4InBlocks, PackedTensor
from raylm.models.quantised.scaled import ScaledTensor
from raylm.models.staging import Staging

_PART_VALUES = 1 << 24
"""Values of a part at most, so that one large tensor keeps all threads busy."""
MAX_THREADS = 8
Filler = Source | ScaledTensor | PackedTensor | MXFP4InBlocks | BlocksInPatches
"""What a slot is filled from."""


class _Part(NamedTuple):
    """Rows `start`..`stop`-1 of a tensor's share that belongs into the slot."""

    tensor: Filler
    slot: Slot
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        rows = self.stop - self.start
        return self.slot.destination[:rows].nbytes if rows else 0


def fill(jobs: Sequence[tuple[Filler, Slot]], *, progress: bool, num_threads: int | None = None) -> None:
    """Copy of each tensor what its slot takes. Raises ConfigError where a file ends too early."""
    parts = [part for tensor, slot in sorted(jobs, key=_place) for part in _parts(tensor, slot)]
    num_threads = num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        stack.enter_context(_one_thread_each())
        pool = stack.enter_context(ThreadPoolExecutor(num_threads, "weights"))
        total = sum(part.num_bytes for part in parts)
        bar = tqdm(total=total, desc="weights", unit="B", unit_scale=True, leave=False, disable=not progress)
        stack.enter_context(bar)
        idle = _stagings(parts, num_threads)
        copies = {pool.submit(_copy, part, idle): part for part in parts}
        try:
            for done in as_completed(copies):
                done.result()
                bar.update(copies[done].num_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for staging in idle:
            staging.finish()


def _stagings(parts: Sequence[_Part], num_threads: int) -> list[Staging]:
    """One for each thread, where something goes to the GPU; a worker has one."""
    device = next((device for part in parts if (device := part.slot.destination.device).type == "cuda"), None)
    return [] if device is None else Staging.several(device, num_threads)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """One CPU thread for each product of torch: pieces are too small to share, and threads that wait for each other at
    every piece made loading five times slower where other processes use the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that begin now have it too
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _place(job: tuple[Filler, Slot]) -> tuple[str, int]:
    """In the files' order, which is what disks read ahead."""
    tensor, _ = job
    return str(tensor.path), tensor.offset


def _parts(tensor: Filler, slot: Slot) -> Iterator[_Part]:
    rows, unit = len(slot.destination), tensor.row_unit
    step = max(1, _PART_VALUES // max(1, prod(slot.destination.shape[1:])) // unit) * unit
    for start in range(0, rows, step):
        yield _Part(tensor, slot, start, min(start + step, rows))


@torch.inference_mode()
def _copy(part: _Part, idle: list[Staging]) -> None:
    """Copy piece by piece, to a GPU with one of the `idle`, of which there are as many as threads."""
    if part.slot.destination.device.type != "cuda":
        for row, piece in _pieces(part, None):
            part.slot.put(row, piece)
        return
    staging = idle.pop()
    try:
        for row, piece in _pieces(part, staging):
            staging.copy(piece, part.slot, row)
    finally:
        idle.append(staging)


def _pieces(part: _Part, room: Room | None) -> Iterator[tuple[int, ops.Rows]]:
    """Whole rows of the slot's part, and the slot's row that each piece begins at."""
    tensor, slot, start, stop = part
    if slot.dim == 0:
        pieces, first = tensor.pieces(slot.start + start, slot.start + stop, room=room), slot.start
    else:
        pieces, first = tensor.pieces(start, stop, (slot.start, slot.start + slot.length), room), 0
    for row, piece in pieces:
        yield row - first, piece
