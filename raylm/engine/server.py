"""The engine's end of the request channel, and the thread that drives the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from raylm.core.events import EventBatch
from raylm.core.load import Load
from raylm.core.measures import EngineMeasures
from raylm.core.step import TokenDelta
from raylm.engine.engine import Engine
from raylm.engine.followers import Followers
from raylm.engine.kv_publisher import KVPublisher
from raylm.engine.messages import (
    Abort,
    Controlled,
    Follow,
    LossKind,
    Lost,
    Order,
    Refused,
    Submit,
    Taken,
    ToEngine,
)
from raylm.engine.outbox import MAX_UNREAD_MESSAGES, Outbox
from raylm.errors import EngineDeadError, Overloaded, RequestRejected
from raylm.log import get_logger

logger = get_logger(__name__)

_IDLE_POLL_MS = 200
_BACKLOG_POLL_MS = 20
"""How often an engine with nothing else to do looks whether a client that was behind reads again."""
_DELAY_POLL_MS = 1
"""How often an engine that delays a plan looks whether the step that runs has ended early."""
_LAST_WORDS_S = 1.0


class AllowedClients:
    """The public keys that may connect; libzmq's authenticator asks it for every handshake."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def allow(self, public_key: bytes) -> None:
        self._keys.add(public_key)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


class EngineServer:
    """Takes requests, steps the engine, sends each client its deltas. run() belongs to one thread."""

    def __init__(self, engine: Engine, *, host: str, publisher: KVPublisher | None = None) -> None:
        """`publisher`: tells others than clients of the cached blocks."""
        self._publisher = publisher
        self._engine = engine
        self.clients = AllowedClients()
        self._context = zmq.Context()
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(domain="*", credentials_provider=self.clients)
        self._socket, self.address, self.public_key = _bind(self._context, host)
        self._owner: dict[str, bytes] = {}
        self._outbox = Outbox(self._socket, self._drop)
        self._followers = Followers(engine.event_snapshot, self._outbox.offer)
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._stop_reason: str | None = None

    @property
    def num_live(self) -> int:
        """Sequences taken and not ended."""
        return len(self._owner)

    def load(self) -> Load:
        return self._engine.stats()

    def measures(self) -> EngineMeasures:
        """Called from any thread."""
        return self._engine.measures()

    def run(self) -> None:
        """Serve until stop(), or until the engine dies: this raises what it died of.

        Either way every live request fails with the reason.
        """
        try:
            while self._stop_reason is None:
                if not self._engine.has_work:
                    self._engine.check()
                self._receive(self._patience_ms)
                self._delay()
                if deltas := self._engine.step():
                    begin = time.perf_counter()
                    self._deliver(deltas)
                    self._engine.meter.send.observe(time.perf_counter() - begin)
                self._catch_up()
                self._publish(self._engine.take_events())
                self._followers.tell(self.load)
        except Exception as error:
            logger.error("the engine stopped: %s", error)
            self._lose_all("engine_dead", str(error))
            raise
        else:
            self._lose_all("engine_stopped", self._stop_reason)
        finally:
            # First of all, so that no client waits for workers that are slow to end.
            self._socket.close(linger=round(1000 * _LAST_WORDS_S))
            if self._publisher is not None:
                self._publisher.close()
            self._engine.shutdown()
            self._auth.stop()
            self._context.term()

    def stop(self, reason: str = "the engine was stopped") -> None:
        """Ask run() to return after the step in hand; live requests fail with the reason. Called from any thread."""
        self._stop_reason = reason

    @property
    def _patience_ms(self) -> int:
        if self._engine.has_work:
            return 0
        return _IDLE_POLL_MS if self._outbox.is_empty else _BACKLOG_POLL_MS

    def _delay(self) -> None:
        """Take requests until the next step must be planned."""
        begin = time.perf_counter()
        while 1000 * self._engine.delay_s >= _DELAY_POLL_MS:
            self._receive(_DELAY_POLL_MS)
        self._engine.meter.delay.observe(time.perf_counter() - begin)

    def _receive(self, timeout_ms: int) -> None:
        """Take every message that is there; wait up to `timeout_ms` for the first."""
        if not self._socket.poll(timeout_ms):
            return
        taken: dict[bytes, list[str]] = {}
        for client, message in self._unread():
            if self._handle(client, message) and isinstance(message, Submit):
                taken.setdefault(client, []).append(message.request_ids[0])
        for client, request_ids in taken.items():
            self._outbox.post(client, Taken(request_ids))

    def _unread(self) -> Iterator[tuple[bytes, ToEngine]]:
        """Every message that is there, with its client. What cannot be understood is refused where it has a name."""
        while True:
            try:
                client, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(data)
            except (msgspec.MsgspecError, RequestRejected) as error:
                logger.warning("a message of %d bytes is refused: %s", len(data), error)
                if (name := _name_in(data)) is not None:
                    self._outbox.post(client, _unreadable(name, error))
            else:
                yield client, message

    def _own_unread(self) -> None:
        """Requests that came while the last step hung fail with all others, for the same reason."""
        for client, message in self._unread():
            if isinstance(message, Submit):
                for request_id in message.request_ids:
                    self._owner.setdefault(request_id, client)
            elif isinstance(message, Follow | Order):
                self._owner.setdefault(message.request_id, client)

    def _lose_all(self, kind: LossKind, reason: str) -> None:
        """Say to every client what has become of all that it waits for."""
        self._own_unread()
        lost: dict[bytes, list[str]] = {}
        for request_id, client in (*self._owner.items(), *self._followers.items()):
            lost.setdefault(client, []).append(request_id)
        for client, request_ids in lost.items():
            self._outbox.post(client, Lost(request_ids, kind, reason))
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._outbox.is_empty and time.monotonic() < deadline:
            self._outbox.flush()
            time.sleep(_BACKLOG_POLL_MS / 1000)

    def _handle(self, client: bytes, message: ToEngine) -> bool:
        """False where the message was refused."""
        if isinstance(message, Abort):
            self._abort(message.request_id)
            return True
        try:
            if isinstance(message, Follow):
                self._follow(client, message)
            elif isinstance(message, Order):
                self._carry_out(client, message)
            else:
                self._submit(client, message)
        except (RequestRejected, Overloaded) as error:
            self._outbox.post(client, _refusal(message, error))
            return False
        return True

    def _abort(self, request_id: str) -> None:
        self._followers.remove(request_id)
        if self._owner.pop(request_id, None) is not None:
            self._engine.abort(request_id)

    def _submit(self, client: bytes, message: Submit) -> None:
        ids = message.request_ids
        if len(set(ids)) < len(ids) or any(self._is_taken(request_id) for request_id in ids):
            raise _in_use(ids)
        if message.begun:
            self._engine.resume(ids, message.prompt_ids, message.params, message.options, message.begun)
        else:
            self._engine.add(ids, message.prompt_ids, message.params, message.options)
        self._owner.update(dict.fromkeys(ids, client))

    def _follow(self, client: bytes, message: Follow) -> None:
        if message.request_id in self._owner:
            raise _in_use([message.request_id])
        self._followers.add(message.request_id, client)

    def _carry_out(self, client: bytes, order: Order) -> None:
        try:
            answers = self._engine.control(order.op)
        except EngineDeadError:
            self._owner[order.request_id] = client  # so that it learns of it
            raise
        self._outbox.post(client, Controlled(order.request_id, answers))

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._owner or request_id in self._followers

    def _publish(self, batch: EventBatch | None) -> None:
        self._followers.publish(batch)
        if self._publisher is not None:
            self._publisher.publish(batch, self._engine.take_tokens())

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        """One message for each client that got tokens."""
        batches: dict[bytes, list[TokenDelta]] = {}
        for delta in deltas:
            client = self._owner.get(delta.request_id)
            if client is None:
                continue
            batches.setdefault(client, []).append(delta)
            if delta.finish_reason is not None:
                del self._owner[delta.request_id]
        if not batches:
            return
        load = self.load()
        for client, batch in batches.items():
            self._outbox.deliver(client, batch, load)

    def _catch_up(self) -> None:
        """Send what clients had no room for, and give up those who do not read."""
        if self._outbox.is_empty:
            return
        self._outbox.flush()
        for client, reason in self._outbox.stalled():
            follows = [request_id for request_id, owner in self._followers.items() if owner == client]
            self._outbox.end(client, Lost(self._end_all(client, reason) + follows, "ingress_stalled", reason))

    def _drop(self, client: bytes) -> None:
        """A client has gone; its requests go too."""
        self._outbox.forget(client)
        self._end_all(client, "it has disconnected")

    def _end_all(self, client: bytes, reason: str) -> list[str]:
        """End the requests of a client; returns their ids."""
        mine = [request_id for request_id, owner in self._owner.items() if owner == client]
        for request_id in mine:
            self._engine.abort(request_id)
            del self._owner[request_id]
        self._followers.drop(client)
        logger.warning("client %s was dropped with %d requests: %s", client.hex(), len(mine), reason)
        return mine


def _in_use(ids: list[str]) -> RequestRejected:
    return RequestRejected(f"the request ids {ids!r:.200} are already in use or given twice", param="request_ids")


def _refusal(message: Submit | Follow | Order, error: RequestRejected | Overloaded) -> Refused:
    """The answer to a message that was not taken; a Submit is named by its first id."""
    name = message.request_ids[0] if isinstance(message, Submit) else message.request_id
    if isinstance(error, Overloaded):
        return Refused(name, "overloaded", str(error), retry_after=error.retry_after)
    return Refused(name, "rejected", str(error), error.param, error.code)


def _name_in(data: bytes) -> str | None:
    """The id that a message goes by, or None where it is not even that well made."""
    try:
        _, name = msgspec.msgpack.decode(data)[:2]
    except (msgspec.MsgspecError, TypeError, ValueError):
        return None
    if isinstance(name, list) and name:
        name = name[0]
    return name if isinstance(name, str) else None


def _unreadable(name: str, error: Exception) -> Refused:
    if isinstance(error, RequestRejected):
        return Refused(name, "rejected", str(error), error.param, error.code)
    return Refused(name, "rejected", f"the engine cannot read the request {name!r:.200}: {error}")


def _bind(context: zmq.Context[Any], host: str) -> tuple[zmq.Socket[bytes], str, bytes]:
    """A CURVE server socket on a port of the system's choice; returns it, its address and its public key."""
    socket = context.socket(zmq.ROUTER)
    public, secret = zmq.curve_keypair()
    socket.curve_server = True
    socket.curve_secretkey = secret
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
    # A client bounds what it sends before the engine answers.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
    port = socket.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
    return socket, f"tcp://{host}:{port}", public
