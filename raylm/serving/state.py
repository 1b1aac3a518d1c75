"""GET /state: what the server does now, for people who look at it. Prometheus reads /metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from raylm import __version__
from raylm.generation.served_model import EngineStats, ModelCatalog

WINDOW_S = 10.0
"""Rates are means over about this time."""
_SAMPLE_EVERY_S = 0.5


class EngineState(msgspec.Struct):
    """One replica's engine. cache_usage: the share of its KV cache in use; 1 is full. tokens_per_s: generated tokens;
    null until two looks are half a second apart."""

    engine: str
    running: int
    waiting: int
    waiting_prompt_tokens: int
    cache_usage: float
    tokens_per_s: float | None


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
    generated: Mapping[str, int]
    """Tokens since each engine's start."""


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
            samples.append(_Sample(now, {engine.engine_id: engine.load.num_generated for engine in stats}))
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
        return EngineState(
            engine.engine_id, load.running, load.waiting, load.waiting_tokens, load.kv_usage, self._rate(engine)
        )

    def _rate(self, engine: EngineStats) -> float | None:
        """Tokens a second between the oldest and the newest sample that know the engine."""
        known = [sample for sample in self._samples if engine.engine_id in sample.generated]
        if len(known) < 2:
            return None
        first, last = known[0], known[-1]
        # The Directory's copy of a load may be older than the one that came with tokens: the count may step back.
        gained = max(0, last.generated[engine.engine_id] - first.generated[engine.engine_id])
        return gained / (last.at - first.at)
