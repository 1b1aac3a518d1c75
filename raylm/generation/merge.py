"""Many completions as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


def merged(streams: list[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all streams as they come; closing it, or an error of one of them, closes all.

    A slow reader holds the streams back: each has at most one item waiting.
    """
    # A single stream pays for nothing.
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: list[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
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
