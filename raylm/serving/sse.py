"""A stream of events, with a sign of life where there are none."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Send


class EventSender:
    """Sends events while its `async with` block runs, and a heartbeat after every `keep_alive_s` seconds without one.

    An event costs one send: the timer is not moved by it, but looks when it is due how long the last one is ago.
    """

    def __init__(self, send: Send, keep_alive_s: float, heartbeat: bytes) -> None:
        """`heartbeat`: what clients skip; empty where the stream's format has no such thing, and none is sent then."""
        self._send = send
        self._heartbeat = heartbeat
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._is_sending = False
        self._beat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventSender:
        self._timer = self._loop.call_later(self._keep_alive_s, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)

    async def send(self, event: bytes) -> None:
        self._is_sending = True
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        self._is_sending = False
        self._last = self._loop.time()

    def _look(self) -> None:
        left = self._last + self._keep_alive_s - self._loop.time()
        # A client that does not read what was sent gets none on top, nor does one whose heartbeat is on its way.
        is_busy = not self._heartbeat or self._is_sending or (self._beat is not None and not self._beat.done())
        if left <= 0 and not is_busy:
            self._beat = self._loop.create_task(self._say_something())
        self._timer = self._loop.call_later(left if left > 0 else self._keep_alive_s, self._look)

    async def _say_something(self) -> None:
        await self._send({"type": "http.response.body", "body": self._heartbeat, "more_body": True})
