"""Counts of values by size, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple


class Buckets(NamedTuple):
    """What a histogram has counted, for others to read: `counts[i]` values up to `bounds[i]` and above the bound before
    it, and a last one above all bounds; `total` is their sum."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float


class Histogram:
    """Counts values by size. Belongs to one thread; others may read it meanwhile, and get the counts of some moment."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    @property
    def buckets(self) -> Buckets:
        return Buckets(self._bounds, list(self._counts), self._total)
