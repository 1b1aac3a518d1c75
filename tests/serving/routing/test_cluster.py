"""Policies on a simulated cluster, and a router that follows real engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raylm.cli import main
from raylm.config.routing import RoutingConfig
from raylm.core.sampling import SamplingParams
from raylm.serving.routing.choice import Ask
from raylm.serving.routing.cluster import Sample
from raylm.serving.routing.engines import RoutedEngine
from raylm.serving.routing.measuring import balance, measure_policy
from raylm.serving.routing.router import ModelRouter
from tests.support.channel_fakes import OPTIONS, Served, collect, until
from tests.support.fakes import FakeExecutor

LOAD = {"rate": 8.0, "sessions": 20, "replicas": 4, "num_blocks": 8000}


@pytest.fixture(scope="module")
def prefix():
    return measure_policy("prefix", **LOAD)


def test_conversations_find_their_prefixes_as_on_one_engine_of_all_the_memory(prefix) -> None:
    whole = measure_policy("prefix", rate=8.0, sessions=20, replicas=1, num_blocks=32_000, speed=4)
    turns = measure_policy("round_robin", **LOAD)
    assert prefix.requests == whole.requests == turns.requests
    assert prefix.hit_rate > 0.95 * whole.hit_rate
    assert turns.hit_rate < prefix.hit_rate - 0.1
    assert prefix.ttft_ms_p99 < turns.ttft_ms_p99


def test_a_cluster_takes_the_keys_of_routing_but_for_the_policy(prefix, capsys) -> None:
    blind = measure_policy("prefix", routing=RoutingConfig(max_match_blocks=1, policy="load"), **LOAD)
    assert blind.policy == "prefix" and blind.hit_rate < prefix.hit_rate - 0.05
    for options, said in (('{"policy": "load"}', "'policy' is not taken"), ('{"weight": 1}', "'weight' is unknown")):
        assert main(["bench", "routing", "--routing", options]) == 2
        assert said in capsys.readouterr().err


def test_four_ingresses_agree_without_a_word(prefix) -> None:
    assert measure_policy("prefix", ingresses=4, **LOAD).hit_rate > prefix.hit_rate - 0.03


def test_an_engine_counts_as_overloaded_where_another_one_is_free_and_requests_wait_for_it() -> None:
    even = Sample([4, 4], [0, 0], [400, 400])
    long = Sample([4, 4], [0, 0], [800, 200])  # more tokens, and nobody waits
    queued = Sample([5, 4], [1, 0], [800, 200])
    no_room = Sample([5, 8], [1, 0], [800, 200])
    all_wait = Sample([9, 9], [1, 1], [800, 200])
    many = Sample([8, 2], [0, 0], [400, 400])
    found = [balance([each], max_sequences=8)[1:] for each in (even, long, queued, no_room, all_wait, many)]
    assert found == [(0, 0, 0), (0, 1, 0), (0, 1, 1), (0, 0, 0), (0, 0, 0), (1, 0, 0)]
    assert balance([even, queued], max_sequences=8) == (4.25, 0, 0.5, 0.5)
    assert balance([]) == (0, 0, 0, 0)


async def test_a_router_learns_from_the_engines_what_each_of_them_has() -> None:
    served = [Served(FakeExecutor(max_model_len=200, num_blocks=200), events=True) for _ in range(3)]
    router = ModelRouter("m", RoutingConfig())
    for number, each in enumerate(served):
        entry = SimpleNamespace(
            engine_id=f"e{number}", state="ready", prefixes=each.engine.prefix_form, model=SimpleNamespace(name="m")
        )
        router.engines[entry.engine_id] = RoutedEngine(entry, each.client(), router.config)
    router.follow()
    engines = list(router.engines.values())
    await until(lambda: len(router.usable) == 3)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = [5] * 150
    # By somebody else, and not through the router.
    other = served[1].client()
    await collect(other, "other", prompt, params)
    num_blocks = len(prompt) // served[1].executor.block_size
    # A router that has not heard yet that the request is over rightly takes another engine.
    await until(lambda: len(engines[1].view.index) >= num_blocks and not engines[1].view.backlog.num_sequences)
    choice = router.choose(Ask([*prompt, 6, 7, 8], OPTIONS))
    assert choice.engine is engines[1] and choice.reason == "prefix"
    assert choice.matched_tokens == len(prompt) // served[1].executor.block_size * served[1].executor.block_size
    assert router.choose(Ask([*prompt, 6], OPTIONS), avoid={"e1"}).engine is not engines[1]
    served[1].engine._cache.forget_prefixes()
    await until(lambda: engines[1].view.index.naming.epoch == 1)
    assert router.choose(Ask([9] * 100, OPTIONS)).matched_tokens == 0
    await other.close()
    for engine in engines:
        await engine.close()
    for each in served:
        each.stop()
