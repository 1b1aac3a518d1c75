"""How busy the engines are, for who spreads requests over several servers: GET /load, and ORCA's header of answers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylm.generation.served_model import EngineStats

_ASKED = b"endpoint-load-metrics-format"
_TOLD = b"endpoint-load-metrics"


class ServerLoad(msgspec.Struct):
    """Sums over all engines. server_load, vLLM's name: completions that run or wait. kv_cache_usage: the mean, 1 is
    full."""

    server_load: int
    requests_running: int
    requests_waiting: int
    prompt_tokens_waiting: int
    kv_cache_usage: float


def server_load(engines: list[EngineStats]) -> ServerLoad:
    loads = [engine.load for engine in engines]
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    usage = sum(load.kv_usage for load in loads) / len(loads) if loads else 0.0
    return ServerLoad(running + waiting, running, waiting, sum(load.waiting_tokens for load in loads), usage)


def load_header(load: ServerLoad, form: bytes) -> bytes | None:
    """An ORCA load report with vLLM's names in the form that was asked for, "TEXT" or "JSON"; None for another."""
    named = {
        "kv_cache_usage_perc": load.kv_cache_usage,
        "num_requests_waiting": float(load.requests_waiting),
        "num_requests_running": float(load.requests_running),
    }
    if form.lower() == b"text":
        return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items()).encode()
    return b"JSON " + msgspec.json.encode({"named_metrics": named}) if form.lower() == b"json" else None


class LoadHeaders:
    """An ASGI application around another one: answers to requests that ask for it say how busy the engines are."""

    def __init__(self, app: ASGIApp, engines: Callable[[], list[EngineStats]]) -> None:
        self._app = app
        self._engines = engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = next((value for name, value in scope["headers"] if name == _ASKED), b"") if "headers" in scope else b""
        if scope["type"] != "http" or not form:
            await self._app(scope, receive, send)
            return

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = load_header(server_load(self._engines()), form)
                if header is not None:
                    message["headers"] = [*message["headers"], (_TOLD, header)]
            await send(message)

        await self._app(scope, receive, telling)
