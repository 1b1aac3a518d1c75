"""The other end of the request channel: one engine, as an ingress sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta
from raylm.engine.messages import Abort, Deltas, FromEngine, Load, Refused, Submit, ToEngine
from raylm.errors import EngineDeadError, Overloaded, RequestRejected

_LAST_WORDS_S = 0.05
_TRY_AGAIN_S = 0.2
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_Error = RequestRejected | Overloaded | EngineDeadError


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
        self._streams: dict[str, _Stream] = {}
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
        """Requests of this client that run or wait in the engine."""
        return len(self._streams)

    @property
    def pressure(self) -> int:
        """Requests in the engine: those of others as it last said, and this client's own as they are now."""
        return self._others + len(self._streams)

    def note_load(self, load: Load) -> None:
        """Take in how busy the engine says it is."""
        self.load = load
        self._others = max(0, load.running + load.waiting - len(self._streams))

    async def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one sequence, several merged into one where the reader is behind.

        Closing the generator early aborts the request. Raises RequestRejected, Overloaded, EngineDeadError.
        """
        self._send(Submit(request_id, prompt_ids, params))
        stream = self._streams[request_id] = _Stream(request_id)
        ended = False
        try:
            while not ended:
                try:
                    delta = await stream.next()
                except (RequestRejected, Overloaded, EngineDeadError):
                    ended = True
                    raise
                ended = delta.finish_reason is not None
                yield delta
        finally:
            self._streams.pop(request_id, None)
            if not ended and self.is_connected:
                self._send(Abort(request_id))

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

    async def _read(self) -> None:
        while True:
            message = self._decoder.decode(await self._socket.recv())
            if isinstance(message, Deltas):
                self.note_load(message.load)
                for delta in message.deltas:
                    if (stream := self._streams.get(delta.request_id)) is not None:
                        stream.push(delta)
            elif (stream := self._streams.get(message.request_id)) is not None:
                stream.fail(_refusal(message))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """A lost connection means that the engine's process has ended: it never closes one on its own."""
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
        for stream in self._streams.values():
            stream.fail(EngineDeadError(reason))


class _Stream:
    """Deltas of one request between the socket's reader and the request's own."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._pending: list[TokenDelta] = []
        self._error: _Error | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, delta: TokenDelta) -> None:
        if delta.finish_reason == "error":
            self.fail(EngineDeadError(delta.message or "the engine has died"))
            return
        self._pending.append(delta)
        self._wake()

    def fail(self, error: _Error) -> None:
        self._error = error
        self._wake()

    async def next(self) -> TokenDelta:
        """Everything that has come since the last call, as one delta; waits when there is nothing."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            return pending[0]
        token_ids = [token for delta in pending for token in delta.token_ids]
        return TokenDelta(self._request_id, token_ids, pending[-1].finish_reason)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _refusal(message: Refused) -> RequestRejected | Overloaded:
    if message.kind == "overloaded":
        return Overloaded(message.message, retry_after=message.retry_after)
    return RequestRejected(message.message, param=message.param, code=message.code)
