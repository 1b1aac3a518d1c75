"""Clients and engines that stop, hang, flood or vanish: nobody aborts, memory is bounded, and messages say what was."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec
import pytest
import zmq

from raylm.core.sampling import SamplingParams
from raylm.engine import client as client_module
from raylm.engine import link, outbox, server
from raylm.engine.client import EngineClient
from raylm.engine.link import KeyPair
from raylm.engine.messages import Lost
from raylm.errors import ConnectionLost, EngineDeadError, EngineStopped, Overloaded, RequestRejected
from tests.support.channel_fakes import OPTIONS, CountingExecutor, PacedExecutor, Served, collect, until
from tests.support.relay import relay

FOREVER = SamplingParams(temperature=0, ignore_eos=True)
LONG_NAME = 20_000
"""Characters of a request's id, which each of its deltas carries: some hundred fill what the kernel keeps."""


class Stalling:
    """A process with a client that does what its commands say."""

    def __init__(self, served: Served, *commands: str) -> None:
        keys = (served.server.public_key, *served.keys)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.engine.stalled_client",
                served.server.address,
                *(key.decode() for key in keys),
                *commands,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._lines = self._process.stdout

    async def line(self) -> str:
        return (await asyncio.to_thread(self._lines.readline)).strip()

    async def result(self) -> list[object]:
        return list(json.loads(await self.line()))

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def end(self) -> int:
        self._lines.close()
        return await asyncio.to_thread(self._process.wait)


async def test_a_client_that_is_held_longer_than_any_heartbeat_reads_on():
    """Its receiving queue is full and stays so for 9 s, as when a tokenizer holds the GIL; libzmq must not abort."""
    served = Served(CountingExecutor(max_model_len=12_000, num_blocks=24_000, pause_s=0.0005))
    stalling = Stalling(served, "start a", "sleep 9", "finish")
    assert await stalling.result() == ["a", 11_999, True, "length", ""]
    assert await stalling.end() == 0
    served.stop()


async def test_a_client_that_was_stopped_reads_on_where_it_was(monkeypatch):
    monkeypatch.setattr(server, "MAX_UNREAD_MESSAGES", 10)
    served = Served(CountingExecutor(max_model_len=3_000, num_blocks=6_000, pause_s=0.0005))
    stalling = Stalling(served, "start " + LONG_NAME * "a", "stop", "finish")
    assert await stalling.line() == "stopped"
    await until(lambda: not served.server._outbox.is_empty)
    stalling.go_on()
    assert await stalling.result() == ["a", 2_999, True, "length", ""]
    assert await stalling.end() == 0
    served.stop()


async def test_a_client_that_lets_too_much_wait_loses_what_ran_and_goes_on(monkeypatch):
    monkeypatch.setattr(server, "MAX_UNREAD_MESSAGES", 10)
    monkeypatch.setattr(outbox, "_MAX_UNSENT_BYTES", 10 * LONG_NAME)
    monkeypatch.setattr(outbox, "_MESSAGE_TOKENS", 8)
    served = Served(CountingExecutor(max_model_len=3_000, num_blocks=6_000, pause_s=0.0005))
    stalling = Stalling(served, "start " + LONG_NAME * "a", "stop", "finish", "start b", "finish")
    assert await stalling.line() == "stopped"
    await until(lambda: served.server.num_live == 0)
    assert not served.engine.has_work or served.engine.stats().running == 0
    stalling.go_on()
    name, count, is_whole, code, message = await stalling.result()
    assert (name, is_whole, code) == ("a", True, "ingress_stalled")
    assert 0 < count < 2_999 and str(message).startswith("the ingress has not read for ")
    assert await stalling.result() == ["b", 2_999, True, "length", ""]
    assert await stalling.end() == 0
    served.stop()


def _serve(end: Connection) -> None:
    served = Served(CountingExecutor(max_model_len=12_000, num_blocks=24_000, pause_s=0.01))
    end.send((served.server.address, served.server.public_key, served.keys))
    end.recv()
    served.stop()


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        self.address, self._server_key, self._keys = self._end.recv()

    def client(self) -> EngineClient:
        return EngineClient(self.address, server_key=self._server_key, keys=self._keys)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._end.close()


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    made = EngineProcess()
    yield made
    made.end()


async def test_an_engine_whose_process_ended_is_dead(engine):
    client = engine.client()
    stream = client.generate(["a"], [1], FOREVER, OPTIONS)
    await anext(stream)
    engine.signal(signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="the engine has died: nothing listens"):
        while True:
            await anext(stream)
    with pytest.raises(Overloaded, match="cannot be reached"):
        await client.generate(["b"], [1], FOREVER, OPTIONS).admitted()
    await client.close()


async def test_an_engine_that_hangs_is_found_and_taken_again_when_it_goes_on(engine, monkeypatch):
    for name, value in {"_HEARTBEAT_MS": 100, "_SILENCE_MS": 3000}.items():
        monkeypatch.setattr(link, name, value)
    client = engine.client()
    stream = client.generate(["a"], [1], FOREVER, OPTIONS)
    await anext(stream)
    engine.signal(signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="the engine hangs"):
        while True:
            await anext(stream)
    assert not client.is_connected
    engine.signal(signal.SIGCONT)
    await until(lambda: client.is_connected)
    assert (await collect(client, "b", [1], SamplingParams(max_tokens=3, ignore_eos=True)))[1] == "length"
    await client.close()


async def test_a_lost_connection_is_not_a_dead_engine():
    served = Served(CountingExecutor(max_model_len=12_000, num_blocks=24_000, pause_s=0.01))
    async with relay(served.server.address) as (address, ends):
        client = EngineClient(address, server_key=served.server.public_key, keys=served.keys)
        stream = client.generate(["a"], [1], FOREVER, OPTIONS)
        await anext(stream)
        for end in ends:
            end.transport.abort()
        with pytest.raises(ConnectionLost, match="the engine lives"):
            while True:
                await anext(stream)
        await until(lambda: client.is_connected)
        assert (await collect(client, "b", [1], SamplingParams(max_tokens=3, ignore_eos=True)))[1] == "length"
        await client.close()
    served.stop()


async def test_an_engine_is_not_lost_where_no_connection_can_be_made_for_a_while(monkeypatch):
    served = Served(CountingExecutor(max_model_len=12_000, num_blocks=24_000, pause_s=0.01))
    async with relay(served.server.address) as (address, ends):
        client = EngineClient(address, server_key=served.server.public_key, keys=served.keys)
        stream = client.generate(["a"], [1], FOREVER, OPTIONS)
        await anext(stream)
        connect, failures = client._connect, [zmq.ZMQError(errno.EMFILE)] * 2
        monkeypatch.setattr(client, "_connect", lambda: _failing(failures) or connect())
        for end in ends:
            end.transport.abort()
        with pytest.raises(ConnectionLost, match="no other can be made: Too many open files"):
            while True:
                await anext(stream)
        with pytest.raises(Overloaded, match="cannot be reached"):
            client.generate(["b"], [1], FOREVER, OPTIONS)
        await until(lambda: client.is_connected)
        assert failures == []
        assert (await collect(client, "c", [1], SamplingParams(max_tokens=3, ignore_eos=True)))[1] == "length"
        await client.close()
    served.stop()


async def test_requests_go_on_where_no_connection_for_heartbeats_can_be_made(monkeypatch):
    served = Served(CountingExecutor(max_model_len=12_000, num_blocks=24_000, pause_s=0.01))
    make, failures, made = link._Pulse, [zmq.ZMQError(errno.EMFILE)] * 2, []
    monkeypatch.setattr(link, "ANSWER_S", 0.01)
    monkeypatch.setattr(link, "_Pulse", lambda *place: _failing(failures) or made.append(make(*place)) or made[-1])
    client = served.client()
    stream = client.generate(["a"], [1], FOREVER, OPTIONS)
    while not made:
        assert await anext(stream)
    await client.close()
    served.stop()


def _failing(failures: list[zmq.ZMQError]) -> None:
    if failures:
        raise failures.pop()


@pytest.mark.parametrize("bound", ["_MAX_UNANSWERED", "_MAX_UNANSWERED_BYTES"])
async def test_what_is_on_its_way_to_a_busy_engine_is_bounded(bound, monkeypatch):
    executor = PacedExecutor(max_model_len=200, num_blocks=400)
    served = Served(executor)
    client = served.client()
    few = SamplingParams(max_tokens=1)
    first = client.generate(["first"], [1], few, OPTIONS)
    await first.admitted()
    await until(lambda: executor.is_waiting)  # From now on the engine reads nothing.
    monkeypatch.setattr(client_module, bound, 20 if bound == "_MAX_UNANSWERED" else 6000)
    streams = []
    with pytest.raises(
        Overloaded, match=r"\d+ requests with \d+ bytes are on their way to the engine and not answered"
    ):
        for number in range(50):
            streams.append(client.generate([str(number)], [1], few, OPTIONS))
    assert 5 < len(streams) <= 20
    executor.permits.release(1000)
    for stream in streams:
        assert [delta async for delta in stream][-1].finish_reason is not None
    assert client._unanswered == {}
    assert (await collect(client, "late", [1], few))[1] is not None
    await client.close()
    served.stop()


async def test_nobody_waits_for_an_engine_that_is_not_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        public, secret = link.zmq.curve_keypair()
        client = EngineClient(address, server_key=public, keys=KeyPair(public, secret))
        with pytest.raises(Overloaded, match="cannot be reached"):
            await client.generate(["a"], [1], FOREVER, OPTIONS).admitted()
        await client.close()


async def test_what_cannot_be_read_ends_the_connection_with_a_reason_and_another_is_made():
    served = Served(CountingExecutor(max_model_len=12_000, num_blocks=24_000, pause_s=0.01))
    client = served.client()
    stream = client.generate(["a"], [1], FOREVER, OPTIONS)
    await anext(stream)
    whole, client._decoder = client._decoder, msgspec.msgpack.Decoder(list[bool])
    with pytest.raises(ConnectionLost, match="cannot be read"):
        while True:
            await anext(stream)
    client._decoder = whole
    await until(lambda: client.is_connected)
    assert (await collect(client, "b", [1], SamplingParams(max_tokens=3, ignore_eos=True)))[1] == "length"
    await client.close()
    served.stop()


async def test_the_reason_of_an_end_holds_for_what_the_engine_has_not_read(engine):
    client = engine.client()
    stream = client.generate(["a"], [1], FOREVER, OPTIONS)
    await anext(stream)
    client._take(Lost([], "engine_stopped", "the replica's drain is over"))
    engine.signal(signal.SIGKILL)
    with pytest.raises(EngineStopped, match="drain is over"):
        while True:
            await anext(stream)
    await client.close()


@pytest.mark.parametrize(
    ("garbled", "message"),
    [
        (["submit", ["a"], ["no token"], {}, {}], "the engine cannot read the request 'a'"),
        (["submit", ["a"], [1], {"top_p": 7.0}, {}], "top_p must be a number"),
        (["submit", ["a"], [1], {"logprobs": True}, {}], "the engine cannot read the request 'a'"),
        (["submit", ["a"]], "the engine cannot read the request 'a'"),
    ],
)
async def test_a_request_that_the_engine_cannot_read_is_refused(garbled, message):
    served = Served(CountingExecutor())
    client = served.client()
    client._encode = lambda _: msgspec.msgpack.encode(garbled)
    with pytest.raises(RequestRejected, match=message):
        await asyncio.wait_for(anext(client.generate(["a"], [1], FOREVER, OPTIONS)), 60)
    await client.close()
    served.stop()


async def test_what_cannot_be_sent_is_refused():
    served = Served(CountingExecutor())
    client = served.client()
    with pytest.raises(RequestRejected, match="cannot be sent"):
        client.generate(["a"], [10**30], FOREVER, OPTIONS)
    await client.close()
    served.stop()
