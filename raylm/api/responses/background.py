"""Responses that run without a client that waits: their events go into the store, from where any ingress sends them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from raylm.api.call import Events
from raylm.api.responses.keeper import Keeper
from raylm.api.responses.leases import LIVE
from raylm.api.responses.records import Published
from raylm.api.responses.running import ResponseRun
from raylm.api.responses.wire import encode
from raylm.errors import RaylmError

if TYPE_CHECKING:
    from raylm.api.responses.store import ResponseStore

PUBLISH_EVERY_S = 0.2
_STOPPED = "server_stopped"
"""The code of an error that only this ingress has."""


class Publisher:
    """Puts the events of a response into the store, several at a time. Must be closed."""

    def __init__(self, store: ResponseStore, response_id: str) -> None:
        self._store = store
        self._id = response_id
        self._events: list[bytes] = []
        self._first = 0
        self._has_begun = False
        self._turn = asyncio.Lock()
        """Rows are published one after the other: who follows skips what comes behind a later one."""
        self._task = asyncio.create_task(self._publish())

    @property
    def has_published(self) -> bool:
        """Or may have: somebody may have seen something of the response."""
        return self._has_begun

    def add(self, told: bytes) -> None:
        """Events, whole."""
        self._events.append(told)

    async def flush(self) -> None:
        async with self._turn:
            if not self._events:
                return
            self._has_begun = True
            count = len(self._events)
            data = b"".join(self._events)
            behind = self._first + data.count(_END)
            await self._store.publish(self._id, self._first, behind - 1, data)
            # What the store did not take is kept for the next time.
            del self._events[:count]
            self._first = behind

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            # The store has logged what fails; the next time may go well, and the last one says if it does not.
            with suppress(RaylmError):
                await self.flush()


_END = b"\n\n"
"""The end of an event; there is none inside of one."""


async def work(run: ResponseRun, store: ResponseStore, keeper: Keeper, *, streams: bool) -> None:
    """Run a stored response that the engine has taken. Raises StoreUnavailable and StoreFull."""
    response = run.response
    publisher = Publisher(store, response.id) if streams else None
    is_told = False
    try:
        async with aclosing(run.events()) as events:
            async for told in events:
                if publisher is not None:
                    publisher.add(told)
                if not is_told and response.output:
                    is_told = True
                    await store.write(response.id, response.status, encode(response))
        if run.error is not None and run.error.code == _STOPPED and not (publisher and publisher.has_published):
            await store.release(response.id)
            return
        last = run.closing()
        if publisher is not None:
            publisher.add(last)
            await publisher.flush()
        await store.write(response.id, response.status, encode(response))
    except asyncio.CancelledError:
        if keeper.is_stopping and not (publisher and publisher.has_published):
            await store.release(response.id)
        raise
    finally:
        if publisher is not None:
            await publisher.aclose()
        await run.aclose()


async def follow(store: ResponseStore, tenant: str, response_id: str, *, after: int) -> Events:
    """The events of a background response behind number `after`, until it has ended."""
    yield b""
    while True:
        # Asked for before the events: those of a response that has ended are all there.
        status = await store.status(tenant, response_id)
        if status is None:
            return
        rows = await store.events(response_id, after=after)
        for row in rows:
            yield _behind(row, after)
            after = row.last
        if status not in LIVE:
            return
        await asyncio.sleep(PUBLISH_EVERY_S)


def _behind(row: Published, after: int) -> bytes:
    """The events of a row whose numbers are greater than `after`."""
    seen = after + 1 - row.first
    if seen <= 0:
        return row.data
    events = row.data.split(_END)
    return _END.join(events[seen:])
