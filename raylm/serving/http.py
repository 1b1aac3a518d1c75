"""The HTTP face as an ASGI application: the table of its routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from raylm import __version__
from raylm.api.about import About
from raylm.api.call import Call
from raylm.api.metrics import HttpMetrics
from raylm.api.openapi import document
from raylm.api.operations import Operation, operations
from raylm.api.responses.keeper import Keeper
from raylm.config.mcp import McpConfig
from raylm.config.responses import ResponsesConfig
from raylm.config.serving import HttpConfig
from raylm.generation.served_model import ModelCatalog
from raylm.serving.answers import Answer
from raylm.serving.cors import Cors
from raylm.serving.endpoint import Endpoint, HttpRoute, NotFound
from raylm.serving.identity.callers import Callers
from raylm.serving.identity.shares import Shares
from raylm.serving.load import LoadHeaders, ServerLoad, server_load
from raylm.serving.loop import LoopWatch
from raylm.serving.metrics.exchange import MetricsExchange
from raylm.serving.metrics.http_counts import HttpCounts
from raylm.serving.pages import page_routes
from raylm.serving.root_path import RootPath
from raylm.serving.state import ServerState, State


def build_http_app(
    models: ModelCatalog,
    config: HttpConfig,
    responses: ResponsesConfig | None = None,
    mcp: McpConfig | None = None,
    shares: Shares | None = None,
    exchange: MetricsExchange | None = None,
) -> ASGIApp:
    """OpenAI's API for the models of a catalog, as an ASGI application; without `responses` none are stored, without
    `mcp` there are no tools of MCP servers. `shares`: what this ingress may give of tenants' limits; all of them where
    there is none but this one. Without `exchange` /metrics shows this process alone. Raises ConfigError when there are
    no keys in `config.api_keys_file`."""
    metrics = HttpMetrics(models) if exchange is None else exchange.metrics
    keeper = None if responses is None or not responses.enabled else Keeper(responses)
    router = build_router(models, config, metrics, keeper, mcp, shares, (exchange or metrics).render)
    told = Cors(LoadHeaders(router, models.stats), config.cors_origins)
    return LoopWatch(RootPath(told, config.root_path), metrics.loop_lag)


def build_router(
    models: ModelCatalog,
    config: HttpConfig,
    metrics: HttpMetrics,
    keeper: Keeper | None = None,
    mcp: McpConfig | None = None,
    shares: Shares | None = None,
    scrape: Callable[[], Awaitable[bytes]] | None = None,
) -> Router:
    """The routes alone. `scrape` gives /metrics. Raises as build_http_app does."""
    kept = Shares() if shares is None else shares

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        exchanging = asyncio.create_task(kept.run()) if config.tenants_file is not None else None
        if keeper is not None:
            keeper.start()
        yield
        if keeper is not None:
            await keeper.stop()
        if exchanging is not None:
            exchanging.cancel()

    callers = Callers(config, kept)
    metrics.also(callers.counts)
    asked = operations(models, config, metrics, keeper, mcp, identity_of=callers.named)
    table = [*map(_route, asked), *_looks(models, scrape or metrics.render)]
    if config.page:
        table += page_routes()
    table.append(_described(table, config.root_path))
    counts = HttpCounts()
    metrics.also(counts)
    paths = dict.fromkeys(route.path for route in table)
    endpoints = {
        path: Endpoint([each for each in table if each.path == path], config, callers, counts) for path in paths
    }
    # A redirected POST loses its body with many clients; a plain 404 says what is wrong.
    return Router(
        [Route(path, endpoint) for path, endpoint in endpoints.items()],
        redirect_slashes=False,
        default=NotFound(callers, table, counts),
        lifespan=lifespan,
    )


def _route(operation: Operation) -> HttpRoute:
    method, path, scope, run = operation[:4]
    return HttpRoute(
        method,
        path,
        scope,
        run,
        operation.dialect,
        is_listed=not operation.is_refused,
        about=operation.about,
        is_counted=operation.is_counted,
    )


def _described(table: Sequence[HttpRoute], root_path: str) -> HttpRoute:
    """The OpenAPI document of these routes, which is made once, when it is first asked for. It says nothing of the
    models, and pages read it that have no key yet."""
    made: list[bytes] = []

    async def describe(call: Call) -> bytes:
        if not made:
            made.append(await asyncio.to_thread(document, table, root_path))
        return made[0]

    return HttpRoute("GET", "/openapi.json", None, describe)


class Health(msgspec.Struct):
    status: str


class Readiness(msgspec.Struct):
    """models: "ready" by each name, or why it cannot be asked now."""

    status: str
    models: dict[str, str]


class Version(msgspec.Struct):
    version: str


_SERVER = "Server"
_HEALTH = About("Whether the server lives.", _SERVER, answer=Health, errors=frozenset({503}), error=Health)
_READY = About(
    "Whether every model, or one of them, can be asked now.",
    _SERVER,
    answer=Readiness,
    query={"model": "the name of the only one that is asked about; 404 where it is unknown"},
    errors=frozenset({404, 503}),
    error=Readiness,
)
_VERSION = About("raylm's version.", _SERVER, answer=Version)
_METRICS = About("Counts for Prometheus.", _SERVER, media="text/plain")
_LOAD = About("How many completions the engines have.", _SERVER, answer=ServerLoad)
_STATE = About("Models, replicas, load and tokens a second.", _SERVER, answer=State)


def _looks(models: ModelCatalog, scrape: Callable[[], Awaitable[bytes]]) -> list[HttpRoute]:
    """How the server is. Probes and Prometheus have no key, and nothing of what is asked or answered is in these."""

    async def health(call: Call) -> Answer:
        alive = models.alive()
        status = "ok" if alive else "the server ends, or has lost sight of its engines"
        return Answer(msgspec.json.encode(Health(status)), 200 if alive else 503)

    async def ready(call: Call) -> Answer:
        readiness, status = _readiness(models, call.query.get("model"))
        return Answer(msgspec.json.encode(readiness), status)

    async def version(call: Call) -> Answer:
        return Answer(msgspec.json.encode(Version(__version__)))

    server_state = ServerState(models)

    async def state(call: Call) -> Answer:
        return Answer(msgspec.json.encode(server_state.look()))

    async def counts(call: Call) -> Answer:
        return Answer(await scrape(), content_type=CONTENT_TYPE_LATEST.encode())

    async def load(call: Call) -> Answer:
        return Answer(msgspec.json.encode(server_load(models.stats())))

    return [
        HttpRoute("GET", "/health", None, health, about=_HEALTH),
        HttpRoute("GET", "/ready", None, ready, about=_READY),
        HttpRoute("GET", "/version", None, version, about=_VERSION),
        HttpRoute("GET", "/metrics", None, counts, about=_METRICS),
        HttpRoute("GET", "/load", None, load, about=_LOAD),
        HttpRoute("GET", "/state", None, state, about=_STATE),
    ]


def _readiness(models: ModelCatalog, name: str | None) -> tuple[Readiness, int]:
    """Of one model, or of all, and the status that says so."""
    names, unready = models.names(), models.unready()
    if name is not None:
        if name not in names:
            return Readiness(f"the model {name!r:.200} does not exist", {}), 404
        names = [name]
    reasons = {each: unready.get(each, "ready") for each in names}
    if not names:
        return Readiness("no model is known", reasons), 503
    waiting = [each for each in names if each in unready]
    if not waiting:
        return Readiness("ready", reasons), 200
    return Readiness(f"not ready: {', '.join(waiting)}", reasons), 503
