"""Connections to an engine's process, for an event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from raylm.engine.outbox import MAX_UNREAD_MESSAGES

_HEARTBEAT_MS = 1_000
_SILENCE_MS = 5_000
ANSWER_S = 2.0
"""An engine whose process answers no heartbeat for _SILENCE_MS, and then no new connection for ANSWER_S, hangs or its
node is gone without a word. (libzmq answers from threads of its own, however busy the engine is.)"""
SILENCE_S = _SILENCE_MS / 1000 + ANSWER_S
_TURN_S = 0.25
_NEVER_MS = 24 * 3600 * 1000
"""When libzmq may connect again by itself. Without any such time it would drop what it has received and nobody read."""
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH

Outcome = Literal["up", "refused", "unknown key", "silent"]


class KeyPair(NamedTuple):
    """CURVE keys of a client, Z85-encoded."""

    public: bytes
    secret: bytes


class EngineAt(NamedTuple):
    """Where an engine listens, and what proves that it is the engine."""

    address: str
    server_key: bytes


class Link:
    """One connection. Once it is lost it stays lost, and what was not sent is forgotten: libzmq does not connect again.

    `send` and `receive` never wait for the network; reading goes on after a loss, as long as messages are there.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], engine: EngineAt, keys: KeyPair) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.curve_serverkey = engine.server_key
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.RCVHWM, MAX_UNREAD_MESSAGES)
        # The client bounds what it sends before the engine answers.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._configure(self._socket)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._readable, self._happened = asyncio.Event(), asyncio.Event()
        self.outcome: Outcome | None = None
        """How the attempt to connect ended; None while it goes on."""
        self.is_lost = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._stir)
        self._loop.add_reader(self._monitor.fileno(), self._look)
        self._socket.connect(engine.address)
        self._loop.call_soon(self._look)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        """Options of the connection."""

    def send(self, data: bytes) -> None:
        """Queue a message; one on a lost connection goes nowhere."""
        self._socket.send(data, zmq.NOBLOCK)
        # Sending may take the news of a message away from the file descriptor, which tells of changes only.
        if self._socket.poll(0):
            self._readable.set()

    def receive(self) -> bytes | None:
        """The next message that is there."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def readable(self) -> bool:
        """Wait for a message; False when the connection is lost and nothing is left to read."""
        while not self._socket.poll(0):
            if self.is_lost:
                return False
            self._readable.clear()
            # Once more after clear(): what came before it is not told again.
            if not self._socket.poll(0):
                await self._readable.wait()
        return True

    async def connected(self, limit_s: float = SILENCE_S) -> Outcome:
        """How the attempt to connect ends. It is "silent" after `limit_s`, counted in turns of this event loop: a loop
        that was held does not take its own pause for the engine's."""
        for _ in range(round(limit_s / _TURN_S)):
            if self.outcome is not None:
                return self.outcome
            self._happened.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_TURN_S):
                    await self._happened.wait()
            self._look()
        return self.outcome or "silent"

    async def lost(self) -> None:
        """Return when the connection is lost."""
        while not self.is_lost:
            self._happened.clear()
            await self._happened.wait()

    def close(self) -> None:
        if not self._socket.closed:
            self.is_lost = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._happened.set()
            self._readable.set()

    def _stir(self) -> None:
        """Take the news from the socket's file descriptor. Until then it stays readable, and the loop never rests."""
        if self._socket.poll(0):
            self._readable.set()

    def _look(self) -> None:
        """Take in what happened to the connection."""
        while not self._socket.closed and self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if self.outcome is None:
                self.outcome = _OUTCOMES.get(event, "refused")
            self.is_lost = self.is_lost or bool(event & _ENDS)
            self._happened.set()
            self._readable.set()


_OUTCOMES: dict[int, Outcome] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "up",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unknown key",
}


class _Pulse(Link):
    """A connection for heartbeats alone.

    Behind messages that nobody reads heartbeats would fail, and libzmq 4.3.5 would then abort the process when it reads
    on (libzmq issue 3937).
    """

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


async def silence(context: zmq.Context[zmq.Socket[bytes]], engine: EngineAt, keys: KeyPair) -> Outcome:
    """Return when the engine's process does not answer any more ("silent", after some 7 seconds) or has ended."""
    limit_s = SILENCE_S
    while True:
        try:
            pulse = _Pulse(context, engine, keys)
        except zmq.ZMQError:
            # This process has no file left for another connection, which says nothing about the engine.
            await asyncio.sleep(ANSWER_S)
            continue
        try:
            outcome = await pulse.connected(limit_s)
            limit_s = ANSWER_S
            if outcome in ("silent", "refused"):
                return outcome
            await (pulse.lost() if outcome == "up" else asyncio.sleep(ANSWER_S))
        finally:
            pulse.close()
