"""Memory of large requests goes back to the system: glibc keeps what was freed for the next request."""

from __future__ import annotations

import asyncio
import ctypes
from concurrent.futures import Executor

LARGE_BYTES = 512 * 1024
"""Smaller requests leave too little behind to be worth a trim."""
TRIM_AFTER_S = 2.0


class MemoryReturn:
    """Trims the heap some time after a large request, in another thread, and once for all requests meanwhile."""

    def __init__(self, executor: Executor, after_s: float = TRIM_AFTER_S) -> None:
        self._executor = executor
        self._after_s = after_s
        self._is_due = False
        # A C library without it (musl) gives memory back by itself.
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def used(self, size: int) -> None:
        """A request of this many bytes or characters was prepared; what it took is free, or will be soon."""
        if size < LARGE_BYTES or self._is_due or self._malloc_trim is None:
            return
        self._is_due = True
        asyncio.get_running_loop().call_later(self._after_s, self._trim)

    def _trim(self) -> None:
        self._is_due = False
        assert self._malloc_trim is not None, "a trim is due only where the C library has it"
        # ctypes lets go of Python's lock meanwhile.
        self._executor.submit(self._malloc_trim, 0)
