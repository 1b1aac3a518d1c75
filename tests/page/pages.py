"""What the page asks, answered by rule."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from raylm.api.call import Call
from raylm.config.serving import HttpConfig
from raylm.serving.endpoint import Endpoint, HttpRoute
from raylm.serving.identity.callers import Callers
from raylm.serving.pages import page_routes


class Scripted:
    """The page in front of an API that answers chats with events as they stand in `answers`, one list a request."""

    def __init__(self, *answers: Sequence[Any], models: Sequence[str] = ("tiny",)) -> None:
        self.answers = list(answers)
        self.models = models
        self.bodies: list[Any] = []

    @property
    def app(self) -> ASGIApp:
        table = [
            *page_routes(),
            HttpRoute("POST", "/v1/chat/completions", None, self._chat),
            HttpRoute("GET", "/v1/models", None, self._list),
            HttpRoute("GET", "/state", None, self._state),
        ]
        return Starlette(
            routes=[Route(route.path, Endpoint([route], HttpConfig(), Callers(HttpConfig()))) for route in table]
        )

    async def _chat(self, call: Call) -> AsyncGenerator[bytes, None]:
        self.bodies.append(json.loads(call.body))
        return self._events(self.answers.pop(0))

    async def _events(self, events: Sequence[Any]) -> AsyncGenerator[bytes, None]:
        for event in events:
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def _list(self, call: Call) -> bytes:
        return json.dumps({"data": [{"id": name} for name in self.models]}).encode()

    async def _state(self, call: Call) -> bytes:
        one = {"ready": True, "replicas": 1, "running": 0, "waiting": 0, "cache_usage": None, "tokens_per_s": None}
        return json.dumps({"version": "0", "models": [{"model": name, **one} for name in self.models]}).encode()


def chunk(*, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    """An event of a chat's stream."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}


def call(index: int, arguments: str, **head: Any) -> dict[str, Any]:
    """An entry of tool_calls; `head` has the id and the name of a call that begins."""
    names = {"name": head.pop("name")} if "name" in head else {}
    return {"index": index, **head, "function": {**names, "arguments": arguments}}
