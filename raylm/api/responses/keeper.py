"""Keeper: the store of responses while an ingress runs, and its live responses there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING
from uuid import uuid4

from raylm.api.responses.faults import StoreUnavailable
from raylm.api.responses.leases import RENEW_EVERY_S
from raylm.config.responses import ResponsesConfig
from raylm.errors import ConfigError, RaylmError
from raylm.log import get_logger

if TYPE_CHECKING:
    from raylm.api.responses.records import StoredResponse
    from raylm.api.responses.store import ResponseStore

logger = get_logger(__name__)

CLAIM_EVERY_S = 3.0
PURGE_EVERY_S = 60.0
OPEN_EVERY_S = 30.0
"""How often a database is tried again that could not be opened and that nobody has asked for since."""
_CLAIMED_AT_ONCE = 16

Resume = Callable[["ResponseStore", "StoredResponse"], Coroutine[None, None, None]]
"""Goes on with a response whose ingress is gone."""


class Keeper:
    """Opens the store when it is first needed. While it is started it renews the leases of this ingress's live
    responses, takes over those of ingresses that are gone, and deletes what has expired."""

    def __init__(self, config: ResponsesConfig) -> None:
        self._config = config
        self._owner = uuid4().hex
        self._store: ResponseStore | None = None
        self._opening = asyncio.Lock()
        self._live: dict[str, asyncio.Task[None] | None] = {}
        """The live responses that this ingress runs; with its task where the response is a background one."""
        self._loose: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._resume: Resume | None = None
        self._models: Callable[[], list[str]] = list
        self._is_stopping = False

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    async def store(self) -> ResponseStore:
        """Raises StoreUnavailable and StoreFull."""
        async with self._opening:
            if self._store is None:
                # SQLAlchemy takes 0.3 s to import, for which nobody should wait who stores nothing.
                opened = await asyncio.to_thread(_store_class)
                try:
                    self._store = await opened.open(self._config, self._owner)
                except ConfigError as error:
                    logger.error("the responses store cannot be opened: %s", error)
                    message = "The responses store cannot be opened; the server's log says why"
                    raise StoreUnavailable(message) from error
        return self._store

    def begin(self, response_id: str) -> None:
        """From now on this ingress runs a stored response."""
        self._live[response_id] = None

    def end(self, response_id: str) -> None:
        self._live.pop(response_id, None)

    def run(self, response_id: str, work: Coroutine[None, None, None]) -> None:
        """Run a stored response in the background. The task is cancelled when the response has been ended from
        elsewhere."""
        task = asyncio.create_task(self._guarded(response_id, work))
        self._live[response_id] = task
        task.add_done_callback(lambda done: self._live.pop(response_id, None))

    def detach(self, work: Awaitable[None]) -> None:
        """Run what nobody waits for."""
        task = asyncio.ensure_future(_logged(work))
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)

    def resume_by(self, resume: Resume, models: Callable[[], list[str]]) -> None:
        """Who goes on with responses that are taken over, and the names of the models that can."""
        self._resume, self._models = resume, models

    def start(self) -> None:
        """Look after the store from now on. Must be called in the event loop."""
        assert self._resume is not None, "resume_by has been called"
        self._watch = asyncio.create_task(self._look_after(self._resume))

    async def stop(self) -> None:
        """Give background responses up for others to take, and close the store."""
        self._is_stopping = True
        tasks = [task for task in (self._watch, *self._live.values(), *self._loose) if task is not None]
        for task in (self._watch, *self._live.values()):
            if task is not None:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._store is not None:
            await self._store.close()

    async def _guarded(self, response_id: str, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except RaylmError as error:
            # Its lease ends, and whoever takes it over finishes it.
            logger.error("the background response %s was lost: %s", response_id, error)
        except Exception:
            logger.exception("the background response %s was lost", response_id)

    async def _look_after(self, resume: Resume) -> None:
        claim_at, purge_at = monotonic(), monotonic() + PURGE_EVERY_S
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                if self._live:
                    await self._renew()
                if monotonic() >= claim_at:
                    claim_at = monotonic() + CLAIM_EVERY_S
                    if not await self._is_open():
                        claim_at = monotonic() + OPEN_EVERY_S
                        continue
                    await self._claim(resume)
                if self._store is not None and monotonic() >= purge_at:
                    purge_at = monotonic() + PURGE_EVERY_S
                    if count := await self._store.purge():
                        logger.info("%d stored responses have expired", count)
            except RaylmError:
                continue  # The store has logged it.
            except Exception:
                logger.exception("looking after the responses store failed")

    async def _renew(self) -> None:
        # A response that begins meanwhile may not have been in the database yet.
        running = dict(self._live)
        mine = await (await self.store()).renew(list(running))
        for response_id, task in running.items():
            if response_id not in mine and task is not None:
                task.cancel()

    async def _is_open(self) -> bool:
        """Open a store that may hold responses of an ingress that is gone."""
        if self._store is None:
            url = self._config.database_url()
            if url.startswith("sqlite:") and not Path(url.removeprefix("sqlite:///")).exists():
                return False
            await self.store()
        return True

    async def _claim(self, resume: Resume) -> None:
        store = await self.store()
        while True:
            taken = await store.claim(_CLAIMED_AT_ONCE, self._models())
            for response in taken:
                logger.info("took over the response %s, whose ingress is gone", response.id)
                self.run(response.id, resume(store, response))
            if len(taken) < _CLAIMED_AT_ONCE:
                return


def _store_class() -> type[ResponseStore]:
    from raylm.api.responses.store import ResponseStore

    return ResponseStore


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except RaylmError:
        pass  # The store has logged it.
    except Exception:
        logger.exception("what was left to do of a response failed")
