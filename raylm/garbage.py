"""Python's search for garbage in cycles, kept out of the steps of an engine."""

from __future__ import annotations

import gc

_BEFORE = gc.get_threshold()
_RARELY = (20_000, 50, 50)
"""Objects that must have come since the last search, and searches of the young before one of the older. A step of a
thousand rows makes thousands of objects that live until the next one. By Python's own numbers, 700 and 10, these grow
old meanwhile, and every hundredth step or so waits 60 ms for a search of all that lives."""


def set_apart() -> None:
    """Never search what lives now, which is to live as long as this process's model or server; the rest rarely."""
    gc.freeze()
    gc.set_threshold(*_RARELY)


def take_back() -> None:
    """What was set apart is searched again, as often as before."""
    gc.unfreeze()
    gc.set_threshold(*_BEFORE)
