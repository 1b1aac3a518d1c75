"""The engine's end of Follow: clients that are told what happens to the cached blocks."""

from __future__ import annotations

import time
from collections.abc import Callable

from raylm.core.events import EventBatch, EventSnapshot
from raylm.core.load import Load
from raylm.engine.messages import BlockEvents, BlockSnapshot, Busy

_TRY_AGAIN_S = 0.2
"""A snapshot costs as much as the cache is large: it is not made anew in every step for a pipe that is full."""
_TELL_EVERY_S = 0.05


class Followers:
    """Sends every batch to every follower. One whose pipe is full gets a snapshot later, never a gap."""

    def __init__(
        self, snapshot: Callable[[], EventSnapshot], send: Callable[[bytes, BlockSnapshot | BlockEvents | Busy], bool]
    ) -> None:
        """`send` returns False where a client's pipe is full."""
        self._snapshot = snapshot
        self._send = send
        self._clients: dict[str, bytes] = {}
        self._behind: dict[str, float] = {}
        self._told: Load | None = None
        self._tell_at = 0.0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._clients

    def add(self, request_id: str, client: bytes) -> None:
        """Begin with a snapshot, or begin again. Raises RequestRejected where the engine keeps no events."""
        snapshot = self._snapshot()
        self._clients[request_id] = client
        self._told = None
        self._begin(request_id, client, snapshot)

    def remove(self, request_id: str) -> None:
        """No error when it does not follow."""
        self._clients.pop(request_id, None)
        self._behind.pop(request_id, None)

    def items(self) -> list[tuple[str, bytes]]:
        """Every id by which somebody follows, with the client."""
        return list(self._clients.items())

    def drop(self, client: bytes) -> None:
        """Forget everything of a client that has gone."""
        for request_id, owner in self.items():
            if owner == client:
                self.remove(request_id)

    def publish(self, batch: EventBatch | None) -> None:
        """Send what a step did, and a snapshot to those that missed something. None: nothing happened."""
        if self._behind:
            self._catch_up()
        if batch is None:
            return
        for request_id, client in list(self._clients.items()):
            if request_id not in self._behind and not self._send(client, BlockEvents(request_id, batch)):
                self._behind[request_id] = time.monotonic() + _TRY_AGAIN_S

    def tell(self, load: Callable[[], Load]) -> None:
        """Say how busy the engine is where it has changed, but not in every step."""
        if not self._clients or (now := time.monotonic()) < self._tell_at:
            return
        self._tell_at = now + _TELL_EVERY_S
        if (current := load()) != self._told:
            self._told = current
            for client in set(self._clients.values()):
                self._send(client, Busy(current))

    def _catch_up(self) -> None:
        now = time.monotonic()
        for request_id, when in list(self._behind.items()):
            # Sending to one may have dropped others of its client.
            if when <= now and request_id in self._clients:
                self._begin(request_id, self._clients[request_id], self._snapshot())

    def _begin(self, request_id: str, client: bytes, snapshot: EventSnapshot) -> None:
        if self._send(client, BlockSnapshot(request_id, snapshot)):
            self._behind.pop(request_id, None)
        else:
            self._behind[request_id] = time.monotonic() + _TRY_AGAIN_S
