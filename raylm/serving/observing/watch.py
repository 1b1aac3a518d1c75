"""Watches each request from its arrival to its end, for logs and traces. Where nobody wants them it is not there."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from time import perf_counter
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from raylm.generation.record import Record
from raylm.serving.request_id import request_id

RECORD = "raylm.record"
"""The key of a request's Record in its ASGI scope."""
MAX_PATH_CHARS = 200


class Observer(Protocol):
    """Someone who wants to know of requests. Observers never fail."""

    def began(self, record: Record, headers: dict[bytes, bytes]) -> None: ...
    def ended(self, record: Record) -> None:
        """Called once for each that began, however it ended."""
        ...


class RequestWatch:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        record = Record(request_id(headers), scope["method"], scope["path"][:MAX_PATH_CHARS])
        # A request that brings no id has the same one in this log line and in all others.
        named = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        scope = {**scope, RECORD: record, "headers": [*named, (b"x-request-id", record.request_id.encode())]}

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                record.is_complete = True

        for observer in self._observers:
            observer.began(record, headers)
        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            record.error = type(error).__name__
            raise
        finally:
            record.ended = perf_counter()
            for observer in self._observers:
                observer.ended(record)
