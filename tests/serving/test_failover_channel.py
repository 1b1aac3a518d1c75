"""Requests that go on over real channels: connections that are cut, engines that stop, readers that leave."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from raylm.config.routing import RoutingConfig
from raylm.core.sampling import SamplingParams
from raylm.engine import client as client_module
from raylm.engine.client import EngineClient
from raylm.errors import ConnectionLost, EngineDeadError
from raylm.serving.routing.engines import RoutedEngine
from raylm.serving.routing.router import ModelRouter
from tests.support.channel_fakes import OPTIONS, CountingExecutor, Served, until
from tests.support.relay import relay

PROMPT = [1, 2, 3]
WISHES = {
    "one": SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    "three": SamplingParams(seed=1, n=3, max_tokens=60, ignore_eos=True),
}
EXPECTED = [length % 60 + 1 for length in range(len(PROMPT), len(PROMPT) + 60)]
"""A token tells its place."""


ENOUGH = 1000
"""Steps for whatever still runs."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of a busy machine that is held for seconds is not taken for an engine that does not answer."""
    monkeypatch.setattr(client_module, "ANSWER_S", 60.0)


def served_with(permits: int) -> Served:
    """An engine that makes so many steps, and more when it is permitted: nothing has ended before the test's faults."""
    return Served(CountingExecutor(max_model_len=200, num_blocks=400, permits=threading.Semaphore(permits)))


@asynccontextmanager
async def router_to(*clients: EngineClient):
    router = ModelRouter("m", RoutingConfig(policy="load"))
    for number, client in enumerate(clients):
        entry = SimpleNamespace(engine_id=f"e{number}", state="ready", prefixes=None)
        router.engines[entry.engine_id] = RoutedEngine(entry, client, router.config)
    await until(lambda: all(client.is_connected for client in clients))
    yield router
    for client in clients:
        await client.close()


async def rest_of(journey, tokens: dict[str, list[int]]) -> dict[str, str]:
    reasons = {}
    async for delta in journey:
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            reasons[delta.request_id] = delta.finish_reason
    return reasons


@pytest.mark.parametrize("unnoticed", [False, True], ids=["cut", "cut unnoticed by the engine"])
@pytest.mark.parametrize("wish", WISHES)
async def test_a_request_goes_on_at_the_same_engine_over_another_connection(wish, unnoticed):
    params, served = WISHES[wish], served_with(5)
    ids = [f"r-{index}" for index in range(params.n)]
    async with relay(served.server.address, unnoticed=unnoticed) as (address, ends):
        client = EngineClient(address, server_key=served.server.public_key, keys=served.keys)
        async with router_to(client) as router:
            journey, tokens = router.generate(ids, PROMPT, params, OPTIONS), {}
            while len(tokens) < len(ids):
                delta = await anext(journey)
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            for end in ends[::2]:
                end.transport.abort()
            served.executor.permits.release(ENOUGH)
            reasons = await asyncio.wait_for(rest_of(journey, tokens), 120)
            assert tokens == dict.fromkeys(ids, EXPECTED) and reasons == dict.fromkeys(ids, "length")
            assert router.num_resumed == 1
    served.stop()


async def test_a_request_that_was_cut_off_before_it_was_taken_is_sent_again():
    params, served = WISHES["one"], served_with(0)
    async with relay(served.server.address, unnoticed=True) as (address, ends):
        client = EngineClient(address, server_key=served.server.public_key, keys=served.keys)
        async with router_to(client) as router:
            journey, tokens = router.generate(["r"], PROMPT, params, OPTIONS), {}
            admitting = asyncio.create_task(journey.admitted())
            await until(lambda: served.server.num_live == 1)
            for end in ends[::2]:
                end.transport.abort()
            served.executor.permits.release(ENOUGH)
            await admitting
            assert await asyncio.wait_for(rest_of(journey, tokens), 120) == {"r": "length"}
            assert tokens == {"r": EXPECTED}
    served.stop()


@pytest.mark.parametrize("loss", [EngineDeadError("it died"), ConnectionLost("it was cut off")])
async def test_a_request_that_is_aborted_when_its_engine_is_lost_goes_on_nowhere(loss):
    first, second = served_with(1), served_with(1)
    async with router_to(first.client(), second.client()) as router:
        journey, tokens = router.generate(["r"], PROMPT, WISHES["one"], OPTIONS), {}
        await anext(journey)
        journey._current.fail(loss)
        journey.abort()
        assert await rest_of(journey, tokens) == {"r": "abort"}
        assert router.num_resumed == 0
    for served in (first, second):
        served.executor.permits.release(ENOUGH)
    first.stop()
    second.stop()


async def test_an_engine_that_stops_hands_its_streams_over():
    first, second = served_with(5), served_with(5)
    for served in (first, second):
        served.hold_until(3)  # what the router sends to each: an engine that began with fewer would run out of steps
    async with router_to(first.client(), second.client()) as router:
        journeys = [router.generate([f"r{number}"], PROMPT, WISHES["one"], OPTIONS) for number in range(6)]
        tokens: dict[str, list[int]] = {}
        reading = [asyncio.create_task(rest_of(journey, tokens)) for journey in journeys]
        await until(lambda: len(tokens) == 6)
        assert first.server.num_live and second.server.num_live
        first.server.stop()
        for served in (first, second):
            served.executor.permits.release(ENOUGH)
        await asyncio.to_thread(first.stop)
        await asyncio.wait_for(asyncio.gather(*reading), 120)
        assert tokens == dict.fromkeys(tokens, EXPECTED) and len(tokens) == 6
        assert router.num_resumed > 0
    second.stop()
