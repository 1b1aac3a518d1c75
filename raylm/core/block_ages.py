"""How long the blocks of the KV cache keep what can be found in them."""

from __future__ import annotations

from raylm.core.histogram import Histogram
from raylm.core.measures import AGE_BOUNDS, BlockMeasures

_ALL_UP_TO = 512
_ONE_IN = 16
"""Of more blocks than that, one in so many is followed: a power of two."""


class BlockAges:
    """Follows blocks from when they are handed out until what can be found in them makes room for something else.

    A block is used while a request holds it, and when one finds it. `lifetime` is from the first use to the eviction,
    `idle_before_evict` from the last use to it, `reuse_gap` from one use to the next. `now` is set by who plans.
    """

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        self.mask = 0 if num_blocks <= _ALL_UP_TO else _ONE_IN - 1
        """A block is followed where none of these bits is set in its number."""
        self._taken = [0.0] * (num_blocks // (self.mask + 1) + 1)
        self._used = list(self._taken)
        self._shift = self.mask.bit_length()
        self._lifetime = Histogram(AGE_BOUNDS)
        self._idle = Histogram(AGE_BOUNDS)
        self._gap = Histogram(AGE_BOUNDS)

    @property
    def measures(self) -> BlockMeasures:
        return BlockMeasures(self._lifetime.buckets, self._idle.buckets, self._gap.buckets)

    def taken(self, block: int) -> None:
        """It was handed out for something new."""
        self._taken[block >> self._shift] = self._used[block >> self._shift] = self.now

    def found(self, block: int) -> None:
        """A request found it."""
        place = block >> self._shift
        self._gap.observe(self.now - self._used[place])
        self._used[place] = self.now

    def released(self, block: int) -> None:
        """Nobody holds it any more."""
        self._used[block >> self._shift] = self.now

    def evicted(self, block: int) -> None:
        """What could be found in it cannot any more."""
        place = block >> self._shift
        self._lifetime.observe(self.now - self._taken[place])
        self._idle.observe(self.now - self._used[place])
