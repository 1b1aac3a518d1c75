"""Python's search for garbage in cycles, kept out of the steps of an engine."""

from __future__ import annotations

import gc
from typing import ClassVar

_RARELY = (20_000, 50, 50)
"""Objects that must have come since the last search, and searches of the young before one of the older. A step of a
thousand rows makes thousands of objects that live until the next one. By Python's own numbers, 700 and 10, these grow
old meanwhile, and every hundredth step or so waits 60 ms for a search of all that lives."""


class SetApart:
    """From here on what lives now is never searched, and the rest rarely: until the last of these is taken back, as
    there may be several models in a process."""

    _held: ClassVar[list[SetApart]] = []
    _before: ClassVar[tuple[int, int, int]]

    def __init__(self) -> None:
        if not self._held:
            SetApart._before = gc.get_threshold()
        self._held.append(self)
        gc.freeze()
        gc.set_threshold(*_RARELY)

    def take_back(self) -> None:
        """What was set apart is searched again, as often as before. May be called twice."""
        if self not in self._held:
            return
        self._held.remove(self)
        if not self._held:
            gc.unfreeze()
            gc.set_threshold(*self._before)
