"""The other end of the request channel: one engine, as an ingress sees it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from uuid import uuid4

import msgspec
import zmq

from raylm.core.control import Control
from raylm.core.events import EventBatch, EventSnapshot
from raylm.core.load import Load
from raylm.core.options import RequestOptions
from raylm.core.request import Begun
from raylm.core.sampling import SamplingParams
from raylm.engine.backlog import Backlog
from raylm.engine.link import ANSWER_S, SILENCE_S, EngineAt, KeyPair, Link, Outcome, silence
from raylm.engine.messages import (
    Abort,
    BlockSnapshot,
    Busy,
    Controlled,
    Deltas,
    Follow,
    FromEngine,
    LossKind,
    Lost,
    Order,
    Refused,
    Submit,
    Taken,
    ToEngine,
)
from raylm.engine.streams import ChannelError, EventFeed, OrderAnswer, Sequences
from raylm.errors import (
    ConnectionLost,
    EngineDeadError,
    EngineStopped,
    IngressStalled,
    Overloaded,
    RequestLost,
    RequestRejected,
)
from raylm.log import get_logger

logger = get_logger(__name__)

_TRY_AGAIN_S = 0.2
_RETRY_AFTER_S = 2.0
_MAX_UNANSWERED = 1000
_MAX_UNANSWERED_BYTES = 64 * 2**20
"""Requests that may be on their way to an engine that is in the middle of a step; past that they are refused here."""
_FRESH_S = 2.0
"""A load that the engine told is newer for so long than what the Directory knows."""
_READ_S = 0.005
"""How long messages are read without a pause for the rest of the event loop."""
_LOSSES: dict[LossKind, type[RequestLost]] = {
    "engine_dead": EngineDeadError,
    "engine_stopped": EngineStopped,
    "ingress_stalled": IngressStalled,
}


class EngineClient:
    """A connection to one engine; made and used inside one event loop.

    Lost, it is made again. What the engine has not answered is bounded, and so is what waits here unread: the engine
    keeps the rest, and ends the requests of a client that does not read for too long.
    """

    def __init__(self, address: str, *, server_key: bytes, keys: KeyPair) -> None:
        self.backlog = Backlog()
        self._heard = -math.inf
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engine = EngineAt(address, server_key)
        self._keys = keys
        self._sequences: dict[str, Sequences] = {}
        self._feeds: dict[str, EventFeed] = {}
        self._orders: dict[str, OrderAnswer] = {}
        self._unanswered: dict[str, int] = {}
        """Bytes of each Submit on its way, by its first id."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self.is_connected = False
        self._others = 0
        self._farewell: RequestLost | None = None
        """What the engine said of its end, which holds for requests that it has not read too."""
        self._link = self._connect()
        self._task = asyncio.create_task(self._run())

    @property
    def num_live(self) -> int:
        """Sequences of this client that run or wait in the engine."""
        return len(self._sequences)

    @property
    def pressure(self) -> int:
        """Sequences in the engine: those of others as it last said, and this client's own as they are now."""
        return self._others + len(self._sequences)

    @property
    def load(self) -> Load:
        """As the engine last told it."""
        return self.backlog.load

    def note_load(self, load: Load) -> None:
        """Take in how busy the Directory says that the engine is, unless the engine itself has spoken of late."""
        if time.monotonic() - self._heard > _FRESH_S:
            self._take_load(load)

    def _take_load(self, load: Load) -> None:
        self.backlog.report(load)
        self._others = max(0, load.running + load.waiting - len(self._sequences))

    def generate(
        self,
        request_ids: Sequence[str],
        prompt_ids: list[int],
        params: SamplingParams,
        options: RequestOptions,
        begun: Sequence[Begun] = (),
        *,
        num_cached: int = 0,
    ) -> Sequences:
        """One sequence for each id from the same prompt, or what follows in each that another engine has `begun`; the
        caller closes what this returns. `num_cached` of the prompt's tokens are believed to be in the engine's cache.

        Raises Overloaded where the engine is away or too much is on its way to it, RequestRejected for what cannot be
        sent; the rest is raised by what this returns.
        """
        if self._link.is_lost:
            raise Overloaded("the engine cannot be reached at the moment", retry_after=_RETRY_AFTER_S)
        message = self._encoded(Submit(list(request_ids), prompt_ids, params, options, list(begun)))
        on_the_way = sum(self._unanswered.values())
        if len(self._unanswered) >= _MAX_UNANSWERED or (
            on_the_way and on_the_way + len(message) > _MAX_UNANSWERED_BYTES
        ):
            raise Overloaded(
                f"{len(self._unanswered)} requests with {on_the_way} bytes are on their way to the engine and not "
                f"answered; at most {_MAX_UNANSWERED} with {_MAX_UNANSWERED_BYTES} bytes may be",
                retry_after=_RETRY_AFTER_S,
            )
        self._link.send(message)
        self._unanswered[request_ids[0]] = len(message)
        self.backlog.send(request_ids[0], len(prompt_ids) - num_cached, len(request_ids))
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
            self._send(Abort(follow_id))

    async def control(self, op: Control) -> list[str]:
        """Have the engine do this between two steps. What each of its workers says of it; nothing where they have no
        part in it. Raises RequestRejected, Overloaded, RequestLost."""
        if self._link.is_lost:
            raise Overloaded("the engine cannot be reached at the moment", retry_after=_RETRY_AFTER_S)
        order_id = uuid4().hex
        answer = self._orders[order_id] = OrderAnswer()
        self._send(Order(order_id, op))
        try:
            return await answer.wait()
        finally:
            del self._orders[order_id]

    def end_all(self, error: RequestLost) -> None:
        """End the live requests with an error; the engine frees them."""
        live = self._live()
        for request_id in live:
            self._send(Abort(request_id))
        self._fail(live, error)

    async def close(self) -> None:
        """Drop the connection; live requests fail."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._link.close()
        self._fail(self._live(), ConnectionLost("the connection to the engine was closed"))
        self._context.term()

    def _connect(self) -> Link:
        return Link(self._context, self._engine, self._keys)

    def _encoded(self, message: Submit) -> bytes:
        try:
            return self._encode(message)
        except (OverflowError, TypeError, ValueError) as error:
            raise RequestRejected(f"the request cannot be sent to an engine: {error}") from error

    def _send(self, message: ToEngine) -> None:
        if not self._link.is_lost:
            self._link.send(self._encode(message))

    def _release(self, request_id: str, abort: bool) -> None:
        del self._sequences[request_id]
        if abort:
            self._send(Abort(request_id))

    def _live(self) -> list[str]:
        return [*self._sequences, *self._feeds, *self._orders]

    def _fail(self, request_ids: list[str], error: ChannelError) -> None:
        for request_id in request_ids:
            failed: Sequences | EventFeed | OrderAnswer | None
            failed = self._sequences.get(request_id) or self._feeds.get(request_id) or self._orders.get(request_id)
            if failed is not None:
                failed.fail(error)

    async def _run(self) -> None:
        """Connect, read until the connection is lost, connect again: how that goes says what has happened."""
        orphans: list[str] = []
        while True:
            link = self._link
            outcome = await link.connected(ANSWER_S if orphans else SILENCE_S)
            self._fail(orphans, self._farewell or _explained(outcome))
            self._farewell = None
            if outcome == "up":
                self.is_connected = True
                error = await self._serve(link)
                self.is_connected = False
                if error is not None:
                    self._fail(self._live(), error)
            else:
                self._fail(self._live(), Overloaded(_NO_CONNECTION[outcome], retry_after=_RETRY_AFTER_S))
                # The engine may only be about to learn this client's key.
                await asyncio.sleep(_TRY_AGAIN_S)
            link.close()
            orphans = self._live()
            self._unanswered.clear()
            self.backlog.lose()
            self._link = await self._connect_again()

    async def _connect_again(self) -> Link:
        """Another connection. Where none can be made (as when the process may open no more files), whoever waits is
        told so, and it is tried until one is made: without this the engine would be lost for good."""
        while True:
            try:
                return self._connect()
            except zmq.ZMQError as error:
                logger.warning("no connection to the engine at %s can be made: %s", self._engine.address, error)
                message = f"the connection to the engine was lost, and no other can be made: {error}"
                self._fail(self._live(), ConnectionLost(message))
                await asyncio.sleep(_TRY_AGAIN_S)

    async def _serve(self, link: Link) -> RequestLost | None:
        """Read until the connection is lost; returns why, where that is known already."""
        reading = asyncio.create_task(self._read(link))
        silent = asyncio.create_task(silence(self._context, self._engine, self._keys))
        try:
            await asyncio.wait((reading, silent), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and silent.result() == "silent":
                return EngineDeadError(f"the engine hangs: its process has not answered for {SILENCE_S:g} s")
            await reading
        except Exception as error:
            logger.exception("what the engine at %s said cannot be read", self._engine.address)
            return ConnectionLost(f"what the engine said cannot be read: {type(error).__name__}: {error}")
        else:
            return None
        finally:
            reading.cancel()
            silent.cancel()
            await asyncio.gather(reading, silent, return_exceptions=True)

    async def _read(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        while await link.readable():
            pause_at = loop.time() + _READ_S
            while loop.time() < pause_at and (data := link.receive()) is not None:
                self._take(self._decoder.decode(data))
            await asyncio.sleep(0)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            self._heard = time.monotonic()
            self._take_load(message.load)
            for delta in message.deltas:
                if (sequences := self._sequences.get(delta.request_id)) is not None:
                    sequences.push(delta)
        elif isinstance(message, Taken):
            for request_id in message.request_ids:
                self._unanswered.pop(request_id, None)
                self.backlog.take(request_id)
                if (sequences := self._sequences.get(request_id)) is not None:
                    sequences.admit()
        elif isinstance(message, Refused):
            self._unanswered.pop(message.request_id, None)
            self.backlog.drop(message.request_id)
            self._fail([message.request_id], _refusal(message))
        elif isinstance(message, Lost):
            error = _LOSSES[message.kind](message.message)
            if not isinstance(error, IngressStalled):
                self._farewell = error
            self._fail(message.request_ids, error)
        elif isinstance(message, Busy):
            self._heard = time.monotonic()
            self._take_load(message.load)
        elif isinstance(message, Controlled):
            if (answer := self._orders.get(message.request_id)) is not None:
                answer.give(message.answers)
        elif (feed := self._feeds.get(message.request_id)) is not None:
            if isinstance(message, BlockSnapshot):
                feed.begin(message.snapshot)
            else:
                feed.push(message.batch)


_NO_CONNECTION: dict[Outcome, str] = {
    "refused": "the engine cannot be reached: nothing listens at its address",
    "silent": "the engine cannot be reached: its process does not answer",
    "unknown key": "the engine does not know this ingress's key yet",
}


def _explained(outcome: Outcome) -> RequestLost:
    """Why a connection was lost, from how the next attempt ended."""
    if outcome == "refused":
        return EngineDeadError("the engine has died: nothing listens at its address any more")
    if outcome == "silent":
        return EngineDeadError("the engine has died or its node is away: the connection was lost, and nothing answers")
    return ConnectionLost("the connection to the engine was lost, and the request with it; the engine lives")


def _refusal(message: Refused) -> RequestRejected | Overloaded:
    if message.kind == "overloaded":
        return Overloaded(message.message, retry_after=message.retry_after)
    return RequestRejected(message.message, param=message.param, code=message.code)
