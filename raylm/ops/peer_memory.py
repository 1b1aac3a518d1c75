"""Windows of GPU memory that the processes of one host share, for the operators over peer memory.

A window is allocated past torch's caching allocator and holds what the kernels count by, besides its data. Its handle
is bytes that may travel to another process. Errors are RuntimeErrors with CUDA's words.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from raylm.ops import extension

_PART = " MIG "
"""In the name that a part of a GPU goes by (Multi-Instance GPU)."""


@dataclass(frozen=True, slots=True)
class Window:
    """A window of this process; `free` it when no other process has it open."""

    device: int
    address: int
    handle: bytes

    @classmethod
    def allocate(cls, device: int, capacity: int) -> Window:
        """A window with two slots of `capacity` bytes on CUDA device number `device`. Raises RuntimeError."""
        address, handle = ctypes.c_void_p(), ctypes.create_string_buffer(_library().raylm_peer_handle_bytes())
        _call("allocate", device, ctypes.c_int64(capacity), ctypes.byref(address), handle)
        assert address.value is not None
        return cls(device, address.value, handle.raw)

    def free(self) -> None:
        """Raises RuntimeError."""
        _call("free", self.device, ctypes.c_void_p(self.address))


@dataclass(frozen=True, slots=True)
class PeerWindow:
    """A window of another process, as this process addresses it."""

    device: int
    address: int

    @classmethod
    def open(cls, device: int, handle: bytes) -> PeerWindow:
        """Map the window to kernels on CUDA device number `device`. Raises RuntimeError where the GPUs cannot."""
        address = ctypes.c_void_p()
        _call("open", device, handle, ctypes.byref(address))
        assert address.value is not None
        return cls(device, address.value)

    def close(self) -> None:
        """Raises RuntimeError."""
        _call("close", self.device, ctypes.c_void_p(self.address))


def missing(device: int) -> str | None:
    """Why this process has no operators over peer memory on this GPU, or None where it has them."""
    status = extension.load()
    if not status.loaded:
        return str(status)
    for name in (
        "peer_all_reduce",
        "peer_all_gather",
        "peer_add_rms_norm",
        "peer_split_add_rms_norm",
        "peer_send_rows",
        "peer_sent_add_rms_norm",
    ):
        if name not in status.ops.get("cuda", ()):
            return f"the compiled extension {status.path} has no {name}"
    if _PART in (name := torch.cuda.get_device_name(device)):
        # Blocks of the sums wait for each other, and so few multiprocessors might not run all of them at once.
        return f"{name} is a part of a GPU, too small for kernels that wait for each other"
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(extension.load().path))
    for name in ("allocate", "open", "close", "free"):
        getattr(library, f"raylm_peer_{name}").restype = ctypes.c_char_p
    return library


def _call(name: str, device: int, *arguments: object) -> None:
    # The library has a CUDA runtime of its own: torch's puts back the device that it knows as the current one.
    with torch.cuda.device(device):
        error: bytes | None = getattr(_library(), f"raylm_peer_{name}")(device, *arguments)
    if error is not None:
        raise RuntimeError(f"CUDA peer memory: {error.decode()}")
