"""What an engine is told besides requests, through the channel."""

from __future__ import annotations

import asyncio

import pytest

from raylm.core.control import ResetCache, StartProfile, StopProfile
from raylm.core.sampling import SamplingParams
from raylm.errors import EngineDeadError, RequestRejected
from tests.support.channel_fakes import PacedExecutor, Served, collect, until
from tests.support.engines import make_engine
from tests.support.fakes import FakeExecutor, expected_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=20)


async def test_a_cache_that_was_reset_finds_nothing_and_requests_go_on() -> None:
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor)
    client = served.client()
    prompt = list(range(1, 30))
    executor.permits.release(20)
    await collect(client, "first", prompt, GREEDY)
    running = asyncio.ensure_future(collect(client, "running", prompt, GREEDY))
    executor.permits.release(3)
    await until(lambda: served.engine.stats().prefix_hits > 0)
    hits = served.engine.stats().prefix_hits
    reset = asyncio.ensure_future(client.control(ResetCache()))
    executor.permits.release(100)
    assert await reset == []
    assert await running == expected_tokens(prompt, GREEDY, 200)
    await collect(client, "after", prompt, GREEDY)
    assert served.engine.stats().prefix_hits == hits
    await client.close()
    served.stop()


async def test_a_profile_without_a_folder_is_refused_with_a_sentence() -> None:
    served = Served(FakeExecutor())
    client = served.client()
    with pytest.raises(RequestRejected, match=r"runtime\.profile_folder is not set"):
        await client.control(StartProfile())
    await client.close()
    served.stop()


async def test_an_order_to_an_engine_that_dies_fails_with_the_reason() -> None:
    class Dying(FakeExecutor):
        def control(self, op: object) -> list[str]:
            raise EngineDeadError("worker 0 died")

    served = Served(Dying(), profile_folder="/traces")
    client = served.client()
    with pytest.raises(EngineDeadError, match="worker 0 died"):
        await client.control(StopProfile())
    await client.close()
    served.stop()


def test_an_order_stands_between_the_steps_planned_before_and_after_it() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor, window=2, profile_folder="/traces")
    engine.add(["a"], [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    assert engine.control(StartProfile(num_steps=2)) == ["done"]
    engine.step()
    engine.control(StopProfile())
    # Two plans are in flight before each step's result is taken.
    assert executor.orders == [(2, StartProfile(num_steps=2)), (3, StopProfile())]


def test_a_cache_is_reset_without_the_workers() -> None:
    executor = FakeExecutor()
    engine = make_engine(executor)
    assert engine.control(ResetCache()) == [] and executor.orders == []
