"""Outcomes: what compiling structures has given, kept for the next request with the same one."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from raylm.grammar.frames import Done, Failed

PASSING_KEPT_S = 60.0
"""How long a failure is kept that may be the machine's and not the structure's."""
_ENTRY_BYTES = 200


class Outcomes:
    """A cache of outcomes, least recently used first out. Not safe to share between threads."""

    def __init__(self, max_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes`: of the texts. The newest outcome is kept, however long it is. `clock` gives seconds."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[bytes, tuple[Done | Failed, float]] = OrderedDict()
        """With the time when each expires."""
        self._num_bytes = 0

    def get(self, key: bytes) -> Done | Failed | None:
        answer, expires = self._kept.get(key, (None, math.inf))
        if answer is None:
            return None
        if self._clock() >= expires:
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: Done | Failed) -> None:
        """A passing failure is kept for PASSING_KEPT_S, anything else until the cache is full."""
        if key in self._kept:
            self._drop(key)
        is_passing = isinstance(answer, Failed) and answer.is_passing
        self._kept[key] = answer, self._clock() + PASSING_KEPT_S if is_passing else math.inf
        self._num_bytes += _size(answer)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: bytes) -> None:
        answer, _ = self._kept.pop(key)
        self._num_bytes -= _size(answer)


def _size(answer: Done | Failed) -> int:
    return _ENTRY_BYTES + len(answer.structure.value if isinstance(answer, Done) else answer.message)
