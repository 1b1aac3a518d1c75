"""GET /state: the models, their engines, and how fast these are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raylm.core.load import Load
from raylm.generation.served_model import EngineStats
from raylm.serving.state import WINDOW_S, ServerState
from tests.support.openai_fakes import Server


def engines(**generated: int) -> list[EngineStats]:
    loads = {"a": Load(3, 1, 0.5, waiting_tokens=70), "b": Load(1, 0, 0.25)}
    return [EngineStats("tiny", name, loads[name]._replace(num_generated=count)) for name, count in generated.items()]


class Looks:
    def __init__(self) -> None:
        self.catalog = Server().catalog
        self.now = 100.0
        self.state = ServerState(self.catalog, clock=lambda: self.now)

    def rates(self, after: float, **generated: int) -> list[float | None]:
        """Of the model and its engines, `after` seconds later."""
        self.now += after
        self.catalog.engine_stats = engines(**generated)
        model = self.state.look().models[0]
        return [model.tokens_per_s, *(engine.tokens_per_s for engine in model.engines)]


async def test_the_route() -> None:
    server = Server()
    server.catalog.engine_stats = engines(a=10, b=20)
    state = (await server.http.get("/state")).json()
    assert (set(state), state["ready"]) == ({"version", "ready", "models"}, True)
    tiny, late = state["models"]
    assert {**tiny, "engines": len(tiny["engines"])} == {
        "model": "tiny",
        "ready": True,
        "replicas": 2,
        "running": 4,
        "waiting": 1,
        "cache_usage": 0.375,
        "tokens_per_s": None,
        "engines": 2,
    }
    assert tiny["engines"][0] == {
        "engine": "a",
        "running": 3,
        "waiting": 1,
        "waiting_prompt_tokens": 70,
        "cache_usage": 0.5,
        "tokens_per_s": None,
        "prefix_hit_rate": None,
    }
    assert (late["ready"], late["replicas"], late["cache_usage"], late["engines"]) == (False, 0, None, [])


def test_rates_are_over_the_window() -> None:
    looks = Looks()
    assert looks.rates(0, a=1000, b=0) == [None, None, None]
    assert looks.rates(2, a=1200, b=50) == [125, 100, 25]
    assert looks.rates(WINDOW_S, a=2200, b=50) == [100, 100, 0]
    assert looks.rates(WINDOW_S, a=2200, b=50) == [0, 0, 0]


def test_hits_are_those_of_the_window() -> None:
    looks = Looks()
    (first,) = engines(a=0)
    seen = []
    for queries, hits in ((1000, 900), (1000, 900), (1400, 1000), (1400, 1000)):
        looks.now += WINDOW_S
        looks.catalog.engine_stats = [
            replace(first, load=first.load._replace(prefix_queries=queries, prefix_hits=hits))
        ]
        seen.append(looks.state.look().models[0].engines[0].prefix_hit_rate)
    assert seen == [None, None, 0.25, None]


def test_many_look() -> None:
    looks = Looks()
    looks.rates(0, a=0)
    for look in range(1, 200):
        looks.rates(0.01, a=look)
    assert looks.rates(0.01, a=200)[0] == pytest.approx(100)
    assert len(looks.state._samples) <= 5


def test_a_rare_look_has_the_mean_since_the_last() -> None:
    looks = Looks()
    looks.rates(0, a=0)
    assert looks.rates(100, a=500) == [5, 5]
    assert looks.rates(100, a=500) == [0, 0]


def test_engines_come_and_go_and_counts_step_back() -> None:
    looks = Looks()
    looks.rates(0, a=100)
    assert looks.rates(1, a=110, b=7) == [10, 10, None]
    assert looks.rates(1, b=9) == [2, 2]
    assert looks.rates(1, b=5) == [0, 0]
