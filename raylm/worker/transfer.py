"""Arrays to the device and tensors back to the host, without waiting for either."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
_TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


class Uploader:
    """Moves arrays to a device, all of a call in one copy; on a CPU the tensors share the arrays' memory.

    The copy comes from pinned memory that torch gives out anew each time and takes back once the copy is done, so
    nothing waits and no copy reads what a later step wrote.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pins = device.type == "cuda"

    def __call__(self, *arrays: np.ndarray) -> list[Tensor]:
        """Tensors of the arrays' own types and shapes ([length] each)."""
        if not self._pins:
            return [torch.from_numpy(array) for array in arrays]
        return unpack(self.pack(arrays).to(self._device, non_blocking=True), arrays)

    def pack(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """The arrays one behind the other: uint8 on the host, ready for a copy that does not wait."""
        starts, size = _places(arrays)
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pins)
        host = buffer.numpy()
        for array, start in zip(arrays, starts, strict=True):
            host[start : start + array.nbytes] = array.view(np.uint8)
        return buffer


def unpack(buffer: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Views of a packed buffer, one for each of the arrays that it was (or will be) packed from."""
    starts, _ = _places(arrays)
    return [
        buffer[start : start + array.nbytes].view(_TYPES[array.dtype])
        for array, start in zip(arrays, starts, strict=True)
    ]


class Download:
    """Tensors on their way to the host, in the order of the device's stream: an event says when they are there.

    With no tensors at all it says when the device has done what it was given until now.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if device.type == "cuda":
            self._tensors = [_to_pinned(tensor) for tensor in tensors]
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

    def get(self) -> list[Tensor]:
        """The tensors on the host; waits for these and for nothing that was started later."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _to_pinned(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _places(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Where each array starts in a packed buffer, and the buffer's bytes."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, size
