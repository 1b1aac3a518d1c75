"""What a slow reader gets: deltas that are merged, block events without a gap."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.core.block_hash import BlockKey
from raylm.core.events import BlockEvent, EventBatch, EventLog, EventSnapshot
from raylm.core.step import Logprobs, TokenDelta
from raylm.engine import streams
from raylm.engine.followers import Followers
from raylm.engine.messages import BlockEvents, BlockSnapshot
from raylm.engine.streams import EventFeed, Sequences
from raylm.errors import Overloaded
from tests.engine.block_replay import replay


class Releases:
    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def __call__(self, request_id: str, abort: bool) -> None:
        self.seen.append((request_id, abort))


def said(*values: float) -> Logprobs:
    """Log probabilities of so many tokens."""
    return Logprobs(list(values), [1] * len(values), [[3]] * len(values), [[0.0]] * len(values))


async def test_merged_deltas_lose_nothing() -> None:
    releases = Releases()
    group = Sequences(["a", "b"], releases)
    group.push(TokenDelta("b", [1], None, None, 4, said(-1.0), said(-7.0)))
    group.push(TokenDelta("a", [2]))
    group.push(TokenDelta("b", [3, 4], None, None, 0, said(-2.0, -3.0)))
    group.push(TokenDelta("b", [5], "deadline", "too late", 0, said(-4.0)))
    said_in_all = said(-1.0, -2.0, -3.0, -4.0)
    whole = TokenDelta("b", [1, 3, 4, 5], "deadline", "too late", 4, said_in_all, said(-7.0))
    assert await anext(group) == whole
    assert await anext(group) == TokenDelta("a", [2])
    group.push(TokenDelta("a", [], "stop"))
    assert [delta async for delta in group] == [TokenDelta("a", [], "stop")]
    assert releases.seen == [("b", False), ("a", False)]


async def test_what_is_ended_keeps_what_has_come() -> None:
    releases = Releases()
    group = Sequences(["a", "b"], releases)
    group.push(TokenDelta("a", [1], None, None, 4, said(-1.0), said(-7.0)))
    group.abort()
    await group.admitted()
    assert [delta async for delta in group] == [
        TokenDelta("a", [1], "abort", None, 4, said(-1.0), said(-7.0)),
        TokenDelta("b", [], "abort"),
    ]
    assert releases.seen == [("a", True), ("b", True)]


async def test_whoever_leaves_aborts_what_has_not_ended() -> None:
    releases = Releases()
    group = Sequences(["a", "b", "c"], releases)
    group.push(TokenDelta("a", [1], "stop"))
    group.push(TokenDelta("b", [2]))
    group.end("b")
    group.end("b")
    await group.aclose()
    await group.aclose()
    assert releases.seen == [("a", False), ("b", True), ("c", True)]
    assert [delta async for delta in group] == []


async def test_a_refusal_fails_all_and_aborts_none() -> None:
    releases = Releases()
    group = Sequences(["a", "b"], releases)
    group.push(TokenDelta("a", [1]))
    group.fail(Overloaded("full", retry_after=1.0))
    assert await anext(group) == TokenDelta("a", [1])
    with pytest.raises(Overloaded, match="full"):
        await anext(group)
    await group.aclose()
    assert releases.seen == [("a", False), ("b", False)]


def event(number: int) -> BlockEvent:
    return BlockEvent("stored", bytes([number]), b"", 4, 0)


async def taken(feed: EventFeed) -> EventSnapshot | EventBatch:
    return await asyncio.wait_for(feed.next(), 60)


async def test_batches_before_the_snapshots_next_are_cut_or_dropped() -> None:
    feed = EventFeed(lambda: None)
    feed.push(EventBatch(0, [event(0)]))
    feed.begin(EventSnapshot(3, [event(9)]))
    feed.push(EventBatch(0, [event(0), event(1)]))
    feed.push(EventBatch(2, [event(2), event(3), event(4)]))
    feed.push(EventBatch(5, [event(5)]))
    assert await taken(feed) == EventSnapshot(3, [event(9)])
    assert await taken(feed) == EventBatch(3, [event(3), event(4)])
    assert await taken(feed) == EventBatch(5, [event(5)])


@pytest.mark.parametrize("loss", ["gap", "too many"])
async def test_a_loss_asks_for_a_snapshot_when_the_reader_comes(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_PENDING_EVENTS", 3)
    asked: list[int] = []
    feed = EventFeed(lambda: asked.append(1))
    reader = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    feed.begin(EventSnapshot(0, []))
    await reader
    assert len(asked) == 1
    for first in range(0, 3):
        feed.push(EventBatch(first, [event(first)]))
    feed.push(EventBatch(4 if loss == "gap" else 3, [event(3)]))
    feed.push(EventBatch(5, [event(5)]))
    assert len(asked) == 1, "nobody reads: nothing is asked for"
    reader = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    assert len(asked) == 2 and not reader.done()
    feed.begin(EventSnapshot(6, [event(5)]))
    assert await reader == EventSnapshot(6, [event(5)])


class Pipe:
    """A follower's pipe with room for a few messages, and the client at its other end."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.messages: list[BlockSnapshot | BlockEvents] = []

    def send(self, client: bytes, message: BlockSnapshot | BlockEvents) -> bool:
        if len(self.messages) >= self.room:
            return False
        self.messages.append(message)
        return True

    def deliver(self, feed: EventFeed) -> None:
        for message in self.messages:
            if isinstance(message, BlockSnapshot):
                feed.begin(message.snapshot)
            else:
                feed.push(message.batch)
        self.messages.clear()


STEPS = st.lists(st.sampled_from(["store", "remove", "clear", "publish", "deliver", "read", "wait"]), max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=STEPS, room=st.integers(1, 3), limit=st.integers(1, 6))
async def test_a_follower_ends_with_what_the_engine_has(steps: list[str], room: int, limit: int) -> None:
    """Pipes that fill, readers that sleep: whatever is lost on the way, the replayed blocks are the engine's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "MAX_PENDING_EVENTS", limit)
        clock = [0.0]
        patch.setattr("raylm.engine.followers.time.monotonic", lambda: clock[0])
        log, pipe = EventLog(), Pipe(room)
        followers = Followers(log.snapshot, pipe.send)
        feed = EventFeed(lambda: followers.add("f", b"client"))
        found: set[bytes] = set()
        live: list[bytes] = []
        count = 0

        async def read() -> None:
            nonlocal found
            reader = asyncio.create_task(feed.next())
            await asyncio.sleep(0)
            pipe.deliver(feed)
            await asyncio.sleep(0)
            if not reader.done():
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            else:
                found = replay(found, reader.result())

        for step in [*steps, *["wait", "publish", "read"] * (len(steps) + 3)]:
            if step == "store":
                count += 1
                live.append(bytes([count]))
                log.stored(BlockKey(live[-1], b"", b""), 0)
            elif step == "remove" and live:
                log.removed(live.pop(0), 0)
            elif step == "clear":
                live.clear()
                log.cleared()
            elif step == "publish":
                followers.publish(log.take())
            elif step == "deliver":
                pipe.deliver(feed)
            elif step == "read":
                await read()
            elif step == "wait":
                clock[0] += 1.0
        assert found == set(live)


def test_a_client_that_has_gone_is_forgotten() -> None:
    pipe = Pipe(10)
    followers = Followers(lambda: EventSnapshot(0, []), pipe.send)
    followers.add("a", b"one")
    followers.add("b", b"two")
    followers.drop(b"one")
    followers.publish(EventBatch(0, [event(0)]))
    assert "a" not in followers and "b" in followers
    assert [message.request_id for message in pipe.messages] == ["a", "b", "b"]
    followers.remove("b")
    followers.publish(EventBatch(1, [event(1)]))
    assert len(pipe.messages) == 3


def test_a_full_pipe_gets_one_snapshot_when_it_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("raylm.engine.followers.time.monotonic", lambda: clock[0])
    made: list[int] = []

    def snapshot() -> EventSnapshot:
        made.append(1)
        return EventSnapshot(len(made), [])

    pipe = Pipe(1)
    followers = Followers(snapshot, pipe.send)
    followers.add("a", b"client")
    for first in range(100):
        followers.publish(EventBatch(first, [event(1)]))
    assert len(made) == 1, "no snapshot is made while it would not be sent"
    pipe.messages.clear()
    followers.publish(None)
    assert pipe.messages == []
    clock[0] = 1.0
    followers.publish(None)
    assert pipe.messages == [BlockSnapshot("a", EventSnapshot(2, []))]
