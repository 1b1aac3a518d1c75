"""What the Directory keeps for /metrics: the last word of every ingress and every engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from raylm.generation.served_model import EngineStats

LIVE_S = 10.0
"""An ingress that has said nothing for this long has gone."""
KEPT_S = 120.0
"""How long its counts are shown after that, so that what it counted last is scraped."""


class IngressCounts(NamedTuple):
    """`counts` are packed families (api/exposition.py)."""

    ingress: str
    counts: bytes
    is_live: bool


class Scrape(NamedTuple):
    """What one scrape shows."""

    ingresses: list[IngressCounts]
    engines: list[EngineStats]


class _Heard(NamedTuple):
    at: float
    counts: bytes


class KeptCounts:
    """Every ingress says its counts once a second, and every replica what its engine has measured."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._ingresses: dict[str, _Heard] = {}
        self._engines: dict[str, EngineStats] = {}

    def count(self, ingress: str, counts: bytes) -> None:
        self._ingresses[ingress] = _Heard(self._clock(), counts)

    def measured(self, engine: EngineStats) -> None:
        self._engines[engine.engine_id] = engine

    def forget_engine(self, engine_id: str) -> None:
        """No error when it is not known."""
        self._engines.pop(engine_id, None)

    def scrape(self) -> Scrape:
        now = self._clock()
        self._ingresses = {name: heard for name, heard in self._ingresses.items() if now - heard.at <= KEPT_S}
        return Scrape(
            [IngressCounts(name, heard.counts, now - heard.at <= LIVE_S) for name, heard in self._ingresses.items()],
            list(self._engines.values()),
        )
