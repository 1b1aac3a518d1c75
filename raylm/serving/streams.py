"""Many completions as one stream, and a stream that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar

from raylm.log import get_logger

log = get_logger(__name__)

Item = TypeVar("Item")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def merged(streams: list[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all streams as they come; closing it, or an error of one of them, closes all.

    A slow reader holds the streams back: each has at most one item waiting.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[Item | _End] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_feed(stream, queue)) for stream in streams]
    try:
        live = len(tasks)
        while live:
            entry = await queue.get()
            if not isinstance(entry, _End):
                yield entry
            elif entry.error is not None:
                raise entry.error
            else:
                live -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    """One stream is over, well or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def _feed(stream: AsyncGenerator[Item, None], queue: asyncio.Queue[Item | _End]) -> None:
    end = _End()
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put(item)
    except Exception as error:
        end = _End(error)
    await queue.put(end)


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
