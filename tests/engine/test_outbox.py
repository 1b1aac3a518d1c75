"""The outbox on connections that fill: nothing is lost, out of order or without a bound."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.core.events import EventBatch
from raylm.core.load import Load
from raylm.core.step import TokenDelta
from raylm.engine import outbox
from raylm.engine.messages import BlockEvents, FromEngine, Lost, Refused
from raylm.engine.outbox import Outbox

LOAD = Load(1, 2, 0.5)


class FullSocket:
    """A ROUTER socket with room for so many messages a client; None where the client has gone."""

    def __init__(self, **room: int | None) -> None:
        self.room = {name.encode(): room for name, room in room.items()}
        self.sent: list[tuple[bytes, FromEngine]] = []
        self.attempts = 0

    def send_multipart(self, parts: tuple[bytes, bytes], flags: int) -> None:
        client, data = parts
        self.attempts += 1
        room = self.room[client]
        if room is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if not room:
            raise zmq.Again
        self.room[client] = room - 1
        self.sent.append((client, msgspec.msgpack.decode(data, type=FromEngine)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(**room: int | None) -> tuple[Outbox, FullSocket, Clock, list[bytes]]:
    socket, clock, gone = FullSocket(**room), Clock(), []
    made = Outbox(socket, lambda client: (made.forget(client), gone.append(client)), clock)
    return made, socket, clock, gone


ACTIONS = st.lists(st.sampled_from(["deliver", "refuse", "room", "flush"]), max_size=60)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions=ACTIONS, limit=st.integers(1, 6), room=st.integers(0, 3))
def test_whatever_fills_a_client_gets_all_in_order(actions: list[str], limit: int, room: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox, "_MESSAGE_TOKENS", limit)
        box, socket, _, _ = make(a=room)
        said: deque[int | str] = deque()
        for number, action in enumerate(actions):
            if action == "deliver":
                box.deliver(b"a", [TokenDelta("x", [number]), TokenDelta("y", [number])], LOAD)
                said.append(number)
            elif action == "refuse":
                box.post(b"a", Refused(str(number), "rejected", "no"))
                said.append(str(number))
            elif action == "room":
                socket.room[b"a"] += 1
            else:
                box.flush()
        socket.room[b"a"] = 1000
        box.flush()
        box.flush()
        assert box.is_empty
    heard: dict[str, list[int | str]] = {"x": [], "y": []}
    for _, message in socket.sent:
        if isinstance(message, Refused):
            for events in heard.values():
                events.append(message.request_id)
        else:
            for delta in message.deltas:
                heard[delta.request_id] += delta.token_ids
    assert heard["x"] == heard["y"] == list(said)


def test_a_full_connection_costs_one_attempt_a_step_and_others_nothing():
    box, socket, _, _ = make(a=0, b=1000)
    for number in range(100):
        box.deliver(b"a", [TokenDelta("x", [number] * 100)], LOAD)
        box.deliver(b"b", [TokenDelta("y", [number])], LOAD)
        box.flush()
    assert socket.attempts <= 201
    assert [client for client, _ in socket.sent] == [b"b"] * 100
    assert not box.offer(b"a", BlockEvents("f", EventBatch(0, [])))


def test_what_waits_is_bounded_in_bytes_and_in_time_and_the_client_hears_why(monkeypatch):
    monkeypatch.setattr(outbox, "_MAX_UNSENT_BYTES", 1000)
    monkeypatch.setattr(outbox, "_MESSAGE_TOKENS", 10)
    box, socket, clock, _ = make(a=0, b=0)
    box.post(b"a", Refused("r", "rejected", "no"))
    for _ in range(200):
        if box.stalled():
            break
        box.deliver(b"a", [TokenDelta("x", [1] * 10)], LOAD)
    [(client, reason)] = box.stalled()
    assert client == b"a" and "has not read for 0 s" in reason
    box.end(b"a", Lost(["x"], "ingress_stalled", reason))
    assert box.stalled() == [], "it is named once"
    box.deliver(b"b", [TokenDelta("y", [1])], LOAD)
    clock.now = 29.0
    assert box.stalled() == []
    clock.now = 31.0
    assert [client for client, _ in box.stalled()] == [b"b"]
    socket.room[b"a"] = 10
    box.flush()
    assert [type(message) for _, message in socket.sent] == [Refused, Lost]


def test_one_who_reads_slowly_but_reads_is_not_stalled():
    box, socket, clock, _ = make(a=0)
    box.deliver(b"a", [TokenDelta("x", [1])], LOAD)
    for step in range(10):
        clock.now = 20.0 * step
        box.post(b"a", Refused(str(step), "rejected", "no"))
        socket.room[b"a"] = 1
        box.flush()
        assert box.stalled() == []


def test_one_who_has_gone_is_forgotten():
    box, socket, _, gone = make(a=0)
    box.deliver(b"a", [TokenDelta("x", [1])], LOAD)
    box.post(b"a", Refused("r", "rejected", "no"))
    socket.room[b"a"] = None
    box.flush()
    assert gone == [b"a"] and box.is_empty
    box.deliver(b"a", [TokenDelta("x", [1])], LOAD)
    assert gone == [b"a", b"a"] and not socket.sent
