"""A line now and then on what each model's engines do, while they do anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import groupby

from raylm.core.load import Load
from raylm.generation.served_model import EngineStats
from raylm.log import event, get_logger

logger = get_logger(__name__)


class Throughput:
    """Writes the lines. Rates are those since the look before."""

    def __init__(self, stats: Callable[[], Sequence[EngineStats]], clock: Callable[[], float] = time.monotonic) -> None:
        """`stats` gives the engines' loads, `clock` seconds."""
        self._stats = stats
        self._clock = clock
        self._before: dict[str, Load] = {}
        self._at = clock()

    async def run(self, every_s: float) -> None:
        """A look every so many seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.look()

    def look(self) -> None:
        """Write a line for each model whose engines run anything, or have since the last look."""
        now, stats = self._clock(), sorted(self._stats(), key=lambda engine: engine.model)
        seconds, self._at = now - self._at, now
        for model, engines in groupby(stats, key=lambda engine: engine.model):
            self._write(model, list(engines), seconds)
        self._before = {engine.engine_id: engine.load for engine in stats}

    def _write(self, model: str, engines: Sequence[EngineStats], seconds: float) -> None:
        generated = self._gained(engines, lambda load: load.num_generated)
        looked_up = self._gained(engines, lambda load: load.prefix_queries)
        found = self._gained(engines, lambda load: load.prefix_hits)
        running = sum(engine.load.running for engine in engines)
        waiting = sum(engine.load.waiting for engine in engines)
        if seconds <= 0 or not (generated or looked_up or running or waiting):
            return
        event(
            logger,
            "throughput",
            model=model,
            engines=len(engines),
            prompt_tokens_per_s=round(looked_up / seconds, 1),
            generation_tokens_per_s=round(generated / seconds, 1),
            running=running,
            waiting=waiting,
            cache_usage=round(sum(engine.load.kv_usage for engine in engines) / len(engines), 4),
            prefix_hit_rate=round(found / looked_up, 4) if looked_up else None,
        )

    def _gained(self, engines: Sequence[EngineStats], count: Callable[[Load], int]) -> int:
        """Of a count since an engine's start. A new engine's counts are all new; one may come from an older copy."""
        before = self._before
        return sum(
            max(0, count(engine.load) - (count(before[engine.engine_id]) if engine.engine_id in before else 0))
            for engine in engines
        )
