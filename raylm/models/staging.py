"""Pinned memory that a file's bytes pass on their way to a GPU."""

from __future__ import annotations

from typing import Self

import numpy as np
import torch

from raylm import ops
from raylm.layers.slots import Slot


class Staging:
    """Two halves of pinned memory and a stream, of one thread: while one half goes to the device, the next piece of the
    file is read into the other."""

    num_bytes = 8 << 20
    """Of a half, and so of a piece at most."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._halves = [torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(2)]
        self._gone = [torch.cuda.Event() for _ in self._halves]
        """After what was in each half."""
        self._half = 0

    @classmethod
    def several(cls, device: torch.device, count: int) -> list[Self]:
        """For `count` threads. What they copy is ordered behind what the device does now."""
        torch.cuda.synchronize(device)
        return [cls(device) for _ in range(count)]

    def take(self, num_bytes: int) -> np.ndarray:
        """A half that nothing reads any more, uint8 [num_bytes]. It is the caller's until the second call from here."""
        self._half = 1 - self._half
        self._gone[self._half].synchronize()
        return self._halves[self._half][:num_bytes]

    def copy(self, piece: ops.Rows, slot: Slot, row: int) -> None:
        """Copy what `take` gave, or other rows on the CPU, into the slot's rows from `row` on; the device converts."""
        with torch.cuda.stream(self._stream):
            if not isinstance(piece, ops.ScaledRows) and slot.converts(piece.dtype):
                piece = piece.to(slot.destination.device, non_blocking=True)
            slot.put(row, piece)
            self._gone[self._half].record()

    def finish(self) -> None:
        """Wait until everything is there."""
        self._stream.synchronize()
