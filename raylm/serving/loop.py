"""The event loop's lag, and which request held the loop when one did."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from time import perf_counter
from typing import Any, Generic, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from raylm import garbage
from raylm.core.histogram import Histogram
from raylm.log import get_logger
from raylm.serving.request_id import request_id

log = get_logger(__name__)

LOOK_EVERY_S = 0.1
HELD_S = 0.25
"""A request that holds the loop for longer in one go is named in the log."""
_MAX_PATH_CHARS = 100

Result = TypeVar("Result")


class LoopWatch:
    """An ASGI application around another one. From its start to its end it observes how late the loop wakes a task that
    sleeps, and it times every step of every request."""

    def __init__(self, app: ASGIApp, lag: Histogram) -> None:
        """`lag` gets the seconds."""
        self._app = app
        self._lag = lag

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._observed(scope, receive, send)
        elif scope["type"] == "http":
            await Held(self._app(scope, receive, send), _name(scope))  # type: ignore[arg-type]  # an async function's
        else:
            await self._app(scope, receive, send)

    async def _observed(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A collection that goes through Ray's and Serve's objects takes 0.1 s, in which the loop stands still.
        held = garbage.set_apart()
        observer = asyncio.create_task(self._observe())
        try:
            await self._app(scope, receive, send)
        finally:
            observer.cancel()
            held.take_back()

    async def _observe(self) -> None:
        while True:
            due = perf_counter() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            self._lag.observe(max(0.0, perf_counter() - due))


class Held(Generic[Result]):
    """Awaits a coroutine, and logs its `name` when it keeps the loop for longer than `held_s` between two awaits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result], name: str, held_s: float = HELD_S) -> None:
        self._coroutine = coroutine
        self._name = name
        self._held_s = held_s

    def __await__(self) -> Generator[Any, Any, Result]:
        coroutine = self._coroutine
        error: BaseException | None = None
        while True:
            start = perf_counter()
            try:
                awaited = coroutine.send(None) if error is None else coroutine.throw(error)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                error = None
                took = perf_counter() - start
                if took > self._held_s:
                    log.warning("%s held the event loop for %.0f ms", self._name, took * 1000)
            try:
                yield awaited
            except BaseException as thrown:  # a cancellation, for the coroutine to see
                error = thrown


def _name(scope: Scope) -> str:
    """The request as Serve's log has it: with the id that Serve gives each, or the client's own."""
    return f"request {request_id(dict(scope['headers']))} ({scope['method']} {scope['path'][:_MAX_PATH_CHARS]})"
