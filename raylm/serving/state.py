"""GET /state: what the server does now, for people who look at it. Prometheus reads /metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from raylm import __version__
from raylm.core.load import Load
from raylm.generation.served_model import EngineStats, ModelCatalog

WINDOW_S = 10.0
"""Rates are means over about this time."""
_SAMPLE_EVERY_S = 0.5


class EngineState(msgspec.Struct):
    """One replica's engine. cache_usage: the share of its KV cache in use; 1 is full. tokens_per_s: generated tokens;
    null until two looks are half a second apart. prefix_hit_rate: of the prompts' tokens of the last seconds those that
    were cached; null where there were none."""

    engine: str
    running: int
    waiting: int
    waiting_prompt_tokens: int
    cache_usage: float
    tokens_per_s: float | None
    prefix_hit_rate: float | None


class ModelState(msgspec.Struct):
    """One model: the sums over its engines, the mean of cache_usage. ready: requests are taken."""

    model: str
    ready: bool
    replicas: int
    running: int
    waiting: int
    cache_usage: float | None
    tokens_per_s: float | None
    engines: list[EngineState]


class State(msgspec.Struct):
    version: str
    ready: bool
    models: list[ModelState]


class _Sample(NamedTuple):
    at: float
    loads: Mapping[str, Load]
    """Of each engine, with its counts since its start."""


class ServerState:
    """The state of a catalog's models. It remembers earlier looks, for the rates between them."""

    def __init__(self, models: ModelCatalog, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._models = models
        self._clock = clock
        self._samples: deque[_Sample] = deque()

    def look(self) -> State:
        stats = self._models.stats()
        self._sample(stats)
        return State(__version__, self._models.ready(), [self._model(name, stats) for name in self._models.names()])

    def _sample(self, stats: Sequence[EngineStats]) -> None:
        now, samples = self._clock(), self._samples
        if not samples or now - samples[-1].at >= _SAMPLE_EVERY_S:
            samples.append(_Sample(now, {engine.engine_id: engine.load for engine in stats}))
        # One sample may be older, so that rare looks have something to compare with.
        while len(samples) > 1 and samples[1].at <= now - WINDOW_S:
            samples.popleft()

    def _model(self, name: str, stats: Sequence[EngineStats]) -> ModelState:
        engines = [self._engine(engine) for engine in stats if engine.model == name]
        rates = [engine.tokens_per_s for engine in engines if engine.tokens_per_s is not None]
        return ModelState(
            name,
            ready=bool(engines) and self._models.get(name) is not None,
            replicas=len(engines),
            running=sum(engine.running for engine in engines),
            waiting=sum(engine.waiting for engine in engines),
            cache_usage=sum(engine.cache_usage for engine in engines) / len(engines) if engines else None,
            tokens_per_s=sum(rates) if rates else None,
            engines=engines,
        )

    def _engine(self, engine: EngineStats) -> EngineState:
        load = engine.load
        rate, hits = self._rates(engine)
        return EngineState(engine.engine_id, load.running, load.waiting, load.waiting_tokens, load.kv_usage, rate, hits)

    def _rates(self, engine: EngineStats) -> tuple[float | None, float | None]:
        """Tokens a second, and the share of hits, between the oldest and the newest sample that know the engine."""
        known = [sample for sample in self._samples if engine.engine_id in sample.loads]
        if len(known) < 2:
            return None, None
        seconds = known[-1].at - known[0].at
        first, last = known[0].loads[engine.engine_id], known[-1].loads[engine.engine_id]
        # The Directory's copy of a load may be older than the one that came with tokens: the count may step back.
        generated = max(0, last.num_generated - first.num_generated)
        looked_up = last.prefix_queries - first.prefix_queries
        hits = (last.prefix_hits - first.prefix_hits) / looked_up if looked_up > 0 else None
        return generated / seconds, hits
