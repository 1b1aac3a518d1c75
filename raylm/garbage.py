"""Python's garbage collector, kept out of the steps of an engine."""

from __future__ import annotations

import gc

_THRESHOLDS = (20_000, 50, 50)
"""A step of a thousand rows makes thousands of objects that live until the next step. At Python's own thresholds, 700
and 10, these objects reach the oldest generation, and every hundredth step or so waits 60 ms for a full collection."""


class SetApart:
    """What set_apart() has done for one model or server."""

    def take_back(self) -> None:
        """When nobody else in the process has set objects apart: collect all of them again, at the thresholds of
        before. May be called twice."""
        if self not in _HELD:
            return
        before = _HELD.pop(self)
        if not _HELD:
            gc.unfreeze()
            gc.set_threshold(*before)


_HELD: dict[SetApart, tuple[int, int, int]] = {}
"""Not taken back yet -> the thresholds before the first of them."""


def set_apart() -> SetApart:
    """Keep the objects that exist now out of all collections (gc.freeze), and collect the others rarely. The collector
    belongs to the process, and so does this."""
    before = next(iter(_HELD.values()), gc.get_threshold())
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    made = SetApart()
    _HELD[made] = before
    return made
