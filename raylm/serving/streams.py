"""A stream that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from raylm.log import get_logger

log = get_logger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class DisconnectGuard:
    """Cancels its `async with` block when the client goes away, as asyncio.timeout does when time is up.

    The request's body must have been read. A block that was cancelled so ends quietly.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._disconnected = False

    async def __aenter__(self) -> DisconnectGuard:
        task = asyncio.current_task()
        assert task is not None, "a guard needs a task to cancel"
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._watcher.cancel()
        if not self._disconnected:
            return False
        # Someone else may have cancelled the task too, such as a server that stops: then it stays cancelled.
        only_ours = self._task.uncancel() <= self._cancelling
        return only_ours and kind is asyncio.CancelledError

    async def _watch(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except Exception as error:
            log.warning("lost sight of a client, its request ends: %s: %s", type(error).__name__, error)
        self._disconnected = True
        self._task.cancel()
