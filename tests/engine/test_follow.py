"""Block events over real sockets, from a real cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from raylm.core.events import EventBatch, EventSnapshot
from raylm.core.sampling import SamplingParams
from raylm.errors import EngineStopped, RequestRejected
from tests.engine.block_replay import replay
from tests.support.channel_fakes import Served, collect, until
from tests.support.fakes import FakeExecutor

Items = AsyncGenerator[EventSnapshot | EventBatch, None]


class Follower:
    """Replays what follow() yields."""

    def __init__(self, items: Items) -> None:
        self.found: set[bytes] = set()
        self.num_items = 0
        self.next = -1
        self.task = asyncio.create_task(self._run(items))

    async def _run(self, items: Items) -> None:
        async with aclosing(items):
            async for item in items:
                if isinstance(item, EventSnapshot):
                    self.next = item.next
                else:
                    assert item.first == self.next, "a gap"
                    self.next += len(item.events)
                self.found = replay(self.found, item)
                self.num_items += 1

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def blocks_of(served: Served) -> set[bytes]:
    return {stored.block_hash for stored in served.engine.event_snapshot().stored}


async def test_followers_see_what_the_cache_holds():
    # A small cache, so that blocks are removed as well.
    served = Served(FakeExecutor(max_model_len=60, num_blocks=40), events=True)
    client, other = served.client(), served.client()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    early = Follower(client.follow())
    await until(lambda: early.num_items == 1)
    assert early.found == set()
    for index in range(8):
        await collect(client, f"a{index}", [index + 1] * 20, params)
    late = Follower(other.follow())
    await until(lambda: late.num_items >= 1)
    for index in range(8):
        await collect(other, f"b{index}", [index + 20] * 20, params)
    expected = blocks_of(served)
    assert 0 < len(expected) < 40
    await until(lambda: early.found == late.found == expected)
    await early.stop()
    await until(lambda: len(served.server._followers._clients) == 1)
    await late.stop()
    await until(lambda: not served.server._followers._clients)
    for one in (client, other):
        await one.close()
    served.stop()


async def test_an_engine_without_events_refuses():
    served = Served(FakeExecutor())
    client = served.client()
    with pytest.raises(RequestRejected, match=r"cache\.events"):
        await anext(client.follow())
    assert (await collect(client, "a", [1], SamplingParams(max_tokens=1)))[1] is not None
    await client.close()
    served.stop()


async def test_a_follower_learns_that_the_engine_was_stopped():
    served = Served(FakeExecutor(), events=True)
    client = served.client()
    items = client.follow()
    assert isinstance(await anext(items), EventSnapshot)
    served.stop()
    with pytest.raises(EngineStopped, match="the engine was stopped"):
        await asyncio.wait_for(anext(items), 60)
    await client.close()
