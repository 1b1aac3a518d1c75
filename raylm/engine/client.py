"""The other end of the request channel: one engine, as an ingress sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple
from uuid import uuid4

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from raylm.core.events import EventBatch, EventSnapshot
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.engine.messages import (
    Abort,
    BlockSnapshot,
    Deltas,
    Follow,
    FromEngine,
    Load,
    LossKind,
    Lost,
    Refused,
    Submit,
    Taken,
    ToEngine,
)
from raylm.engine.streams import ChannelError, EventFeed, Sequences
from raylm.errors import EngineDeadError, EngineStopped, IngressStalled, Overloaded, RequestLost, RequestRejected

_LAST_WORDS_S = 0.05
_TRY_AGAIN_S = 0.2
_HEARTBEAT_MS = 2_000
_SILENCE_MS = 8_000
"""An engine that does not answer a heartbeat for this long is lost: its process is stopped, or its node is gone without
a word. (libzmq answers from a thread of its own, however busy the engine is.)"""
_LOSSES: dict[LossKind, type[RequestLost]] = {
    "engine_dead": EngineDeadError,
    "engine_stopped": EngineStopped,
    "ingress_stalled": IngressStalled,
}
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class KeyPair(NamedTuple):
    """CURVE keys of a client, Z85-encoded."""

    public: bytes
    secret: bytes


class EngineClient:
    """A connection to one engine; made and used inside one event loop."""

    def __init__(self, address: str, *, server_key: bytes, keys: KeyPair) -> None:
        self.load = Load(0, 0, 0.0)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = server_key
        self._socket.curve_publickey = keys.public
        self._socket.curve_secretkey = keys.secret
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        self._sequences: dict[str, Sequences] = {}
        self._feeds: dict[str, EventFeed] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self.is_connected = False
        self._others = 0
        self._address = address
        monitor = self._socket.get_monitor_socket(_WATCHED)
        self._socket.connect(address)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(monitor))]

    @property
    def num_live(self) -> int:
        """Sequences of this client that run or wait in the engine."""
        return len(self._sequences)

    @property
    def pressure(self) -> int:
        """Sequences in the engine: those of others as it last said, and this client's own as they are now."""
        return self._others + len(self._sequences)

    def note_load(self, load: Load) -> None:
        """Take in how busy the engine says it is."""
        self.load = load
        self._others = max(0, load.running + load.waiting - len(self._sequences))

    def generate(
        self, request_ids: Sequence[str], prompt_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> Sequences:
        """One sequence for each id from the same prompt; the caller closes what this returns.

        Raises Overloaded where the engine does not read; the rest is raised by what this returns.
        """
        self._send(Submit(list(request_ids), prompt_ids, params, options))
        sequences = Sequences(request_ids, self._release)
        self._sequences.update(dict.fromkeys(request_ids, sequences))
        return sequences

    async def follow(self) -> AsyncGenerator[EventSnapshot | EventBatch, None]:
        """The engine's cached blocks: a snapshot, then what happens to them, without a gap; at times a new snapshot.

        Raises RequestRejected where cache.events is off, Overloaded, RequestLost.
        """
        follow_id = uuid4().hex
        feed = self._feeds[follow_id] = EventFeed(lambda: self._send(Follow(follow_id)))
        try:
            while True:
                yield await feed.next()
        finally:
            del self._feeds[follow_id]
            self._abort(follow_id)

    async def close(self) -> None:
        """Drop the connection; live requests fail."""
        self._lost("the connection to the engine was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._socket.close()
        self._context.term()

    def _send(self, message: ToEngine) -> None:
        # Tried at once; a full buffer means that the engine has not read for a thousand messages.
        sent = asyncio.ensure_future(self._socket.send(self._encode(message), zmq.NOBLOCK))
        if sent.done() and sent.exception() is not None:
            raise Overloaded("the engine does not take requests at the moment", retry_after=1.0)

    def _release(self, request_id: str, abort: bool) -> None:
        del self._sequences[request_id]
        if abort:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        if not self._socket.closed:
            # An engine that reads nothing is overloaded or dying: neither is the business of one who leaves.
            with contextlib.suppress(Overloaded):
                self._send(Abort(request_id))

    async def _read(self) -> None:
        while True:
            message = self._decoder.decode(await self._socket.recv())
            if isinstance(message, Deltas):
                self.note_load(message.load)
                for delta in message.deltas:
                    if (sequences := self._sequences.get(delta.request_id)) is not None:
                        sequences.push(delta)
            elif isinstance(message, Taken):
                for request_id in message.request_ids:
                    if (sequences := self._sequences.get(request_id)) is not None:
                        sequences.admit()
            elif isinstance(message, Refused):
                self._fail([message.request_id], _refusal(message))
            elif isinstance(message, Lost):
                self._fail(message.request_ids, _LOSSES[message.kind](message.message))
            elif (feed := self._feeds.get(message.request_id)) is not None:
                if isinstance(message, BlockSnapshot):
                    feed.begin(message.snapshot)
                else:
                    feed.push(message.batch)

    def _fail(self, request_ids: list[str], error: ChannelError) -> None:
        for request_id in request_ids:
            failed: Sequences | EventFeed | None
            failed = self._sequences.get(request_id) or self._feeds.get(request_id)
            if failed is not None:
                failed.fail(error)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """A lost connection means that the engine's process has ended or hangs: it never closes one on its own."""
        try:
            while True:
                event = parse_monitor_message(await monitor.recv_multipart())
                if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.is_connected = True
                elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    # libzmq gives up for good here, but the engine may only be about to learn this client's key.
                    await asyncio.sleep(_TRY_AGAIN_S)
                    self._socket.disconnect(self._address)
                    self._socket.connect(self._address)
                elif self.is_connected:
                    self.is_connected = False
                    # What the engine said last may still be in the queue, and it says why.
                    await asyncio.sleep(_LAST_WORDS_S)
                    self._lost("the engine has died: its connection was lost")
        finally:
            monitor.close(linger=0)

    def _lost(self, reason: str) -> None:
        self.is_connected = False
        error = EngineDeadError(reason)
        waiting: list[Sequences | EventFeed] = [*self._sequences.values(), *self._feeds.values()]
        for one in waiting:
            one.fail(error)


def _refusal(message: Refused) -> RequestRejected | Overloaded:
    if message.kind == "overloaded":
        return Overloaded(message.message, retry_after=message.retry_after)
    return RequestRejected(message.message, param=message.param, code=message.code)
