"""What an engine has to say to its clients, kept for those that do not read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from raylm.core.load import Load
from raylm.core.step import TokenDelta
from raylm.engine.messages import BlockEvents, BlockSnapshot, Busy, Controlled, Deltas, Lost, Refused, Taken
from raylm.engine.streams import merged

MAX_UNREAD_MESSAGES = 1000
"""Messages that libzmq keeps for a client on each side of the connection."""
_MAX_UNSENT_BYTES = 16 * 2**20
_MAX_STALL_S = 30.0
"""How much, and for how long, is kept for a client whose connection is full; past that its requests are ended."""
_MESSAGE_TOKENS = 4096
"""Tokens of one message of what was kept, so that no message holds its reader for long."""


class _Backlog:
    """What waits for one client, oldest first: encoded messages, then deltas that may still be merged."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.encoded: deque[tuple[bytes, bool]] = deque()
        """Each with whether it must be kept when the client's requests are ended."""
        self.num_bytes = 0
        self.deltas: dict[str, TokenDelta] = {}
        self.num_tokens = 0
        self.is_ended = False

    def append(self, data: bytes, *, must_arrive: bool) -> None:
        self.encoded.append((data, must_arrive))
        self.num_bytes += len(data)

    def popleft(self) -> None:
        self.num_bytes -= len(self.encoded.popleft()[0])

    def merge(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            before = self.deltas.get(delta.request_id)
            self.deltas[delta.request_id] = delta if before is None else merged([before, delta])
            self.num_tokens += len(delta.token_ids)

    def end(self) -> None:
        """Forget the deltas."""
        self.is_ended = True
        self.encoded = deque(entry for entry in self.encoded if entry[1])
        self.num_bytes = sum(len(data) for data, _ in self.encoded)
        self.deltas.clear()
        self.num_tokens = 0


class Outbox:
    """Sends in order to each client. What a full connection does not take is kept, the deltas of a sequence merged.

    Memory for a client is bounded: `stalled` names those that have let too much wait, or for too long.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        gone: Callable[[bytes], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`gone` is called with a client that has disconnected."""
        self._socket = socket
        self._gone = gone
        self._clock = clock
        self._backlogs: dict[bytes, _Backlog] = {}
        self._load = Load(0, 0, 0.0)
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def is_empty(self) -> bool:
        return not self._backlogs

    def offer(self, client: bytes, message: BlockSnapshot | BlockEvents | Busy) -> bool:
        """Send now or not at all; False where the connection is full."""
        return client not in self._backlogs and self._try(client, self._encode(message))

    def post(self, client: bytes, message: Taken | Refused | Controlled | Lost) -> None:
        """Send, or keep until there is room."""
        data = self._encode(message)
        if client not in self._backlogs and self._try(client, data):
            return
        backlog = self._backlog(client)
        self._seal(backlog)
        backlog.append(data, must_arrive=True)

    def deliver(self, client: bytes, deltas: list[TokenDelta], load: Load) -> None:
        """Send what a step gave the client's sequences, or keep it."""
        if client not in self._backlogs and self._try(client, self._encode(Deltas(deltas, load))):
            return
        self._load = load
        backlog = self._backlog(client)
        backlog.merge(deltas)
        if backlog.num_tokens >= _MESSAGE_TOKENS:
            self._seal(backlog)

    def flush(self) -> None:
        """Send what was kept and now has room. A full connection costs one attempt, however much waits."""
        for client, backlog in list(self._backlogs.items()):
            if not backlog.encoded:
                self._seal(backlog)
            while backlog.encoded and self._try(client, backlog.encoded[0][0]):
                backlog.popleft()
                backlog.since, backlog.is_ended = self._clock(), False
                if client not in self._backlogs:
                    break
            if not backlog.encoded and not backlog.deltas:
                self.forget(client)

    def stalled(self) -> list[tuple[bytes, str]]:
        """Clients that have let too much wait, each with a sentence that says how much."""
        now = self._clock()
        return [
            (client, f"the ingress has not read for {now - backlog.since:.0f} s, {backlog.num_bytes} bytes wait for it")
            for client, backlog in self._backlogs.items()
            if not backlog.is_ended and (backlog.num_bytes > _MAX_UNSENT_BYTES or now - backlog.since > _MAX_STALL_S)
        ]

    def end(self, client: bytes, message: Lost) -> None:
        """Keep no deltas for the client but this message, which it gets when it reads again."""
        backlog = self._backlog(client)
        backlog.end()
        backlog.append(self._encode(message), must_arrive=True)

    def forget(self, client: bytes) -> None:
        """The client has gone."""
        self._backlogs.pop(client, None)

    def _backlog(self, client: bytes) -> _Backlog:
        return self._backlogs.setdefault(client, _Backlog(self._clock()))

    def _seal(self, backlog: _Backlog) -> None:
        """Encode what was merged: what comes from now on is behind it."""
        if backlog.deltas:
            backlog.append(self._encode(Deltas(list(backlog.deltas.values()), self._load)), must_arrive=False)
            backlog.deltas.clear()
            backlog.num_tokens = 0

    def _try(self, client: bytes, data: bytes) -> bool:
        """False where the connection is full. For a client that has gone everything has been said."""
        try:
            self._socket.send_multipart((client, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone(client)
        return True
