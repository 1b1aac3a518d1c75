"""The HTTP face as an ASGI application: routes, bodies, answers. A token's chunk costs one send and no task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from raylm import __version__
from raylm.api.call import Call, Events
from raylm.api.errors import HttpError
from raylm.api.metrics import HttpMetrics
from raylm.api.operations import Operation, operations
from raylm.config.serving import HttpConfig
from raylm.generation.served_model import ModelCatalog
from raylm.serving.answers import Answer, Responder
from raylm.serving.cors import Cors
from raylm.serving.keys import ApiKeys
from raylm.serving.loop import LoopWatch
from raylm.serving.streams import DisconnectGuard

MAX_PATH_CHARS = 100
"""How much of an unknown path a message repeats."""


def build_http_app(models: ModelCatalog, config: HttpConfig) -> ASGIApp:
    """OpenAI's API for the models of a catalog, as an ASGI application. Raises ConfigError when there are no keys in
    `config.api_keys_file`."""
    metrics = HttpMetrics(models)
    return LoopWatch(Cors(build_router(models, config, metrics), config.cors_origins), metrics.loop_lag)


def build_router(models: ModelCatalog, config: HttpConfig, metrics: HttpMetrics) -> Router:
    """The routes alone. Raises as build_http_app does."""
    reads = _Reads(models, metrics)
    api_keys = ApiKeys(config.api_keys_file) if config.api_keys_file is not None else None

    def route(path: str, method: str, handler: Handler, keys: ApiKeys | None = api_keys) -> Route:
        return Route(path, Endpoint(method, handler, config, keys), name=f"{method} {path}")

    routes = [
        route(operation.path, operation.method, partial(_run, operation))
        for operation in operations(models, config, metrics)
    ]
    routes += [
        # Probes and Prometheus have no key, and nothing of what is asked or answered is in these.
        route("/health", "GET", reads.health, keys=None),
        route("/version", "GET", reads.version, keys=None),
        route("/metrics", "GET", reads.metrics, keys=None),
    ]
    # A redirected POST loses its body with many clients; a plain 404 says what is wrong.
    return Router(routes, redirect_slashes=False, default=NotFound(api_keys, [route.name for route in routes]))


Handler = Callable[[Call], Awaitable[Answer | Events]]


async def _run(operation: Operation, call: Call) -> Answer | Events:
    result = await operation.run(call)
    return Answer(result) if isinstance(result, bytes) else result


class _Reads:
    def __init__(self, models: ModelCatalog, metrics: HttpMetrics) -> None:
        self._models = models
        self._metrics = metrics

    async def health(self, call: Call) -> Answer:
        ready = self._models.ready()
        status = "ok" if ready else "not ready: a model has no engine"
        return Answer(msgspec.json.encode({"status": status}), 200 if ready else 503)

    async def version(self, call: Call) -> Answer:
        return Answer(msgspec.json.encode({"version": __version__}))

    async def metrics(self, call: Call) -> Answer:
        return Answer(self._metrics.render(), content_type=CONTENT_TYPE_LATEST.encode())


class ClientGone(Exception):
    """The client left before its request was complete: there is nobody to answer."""


class Endpoint:
    """One route as an ASGI application: it reads the body, calls the handler and sends what that returns or raises.
    With `keys`, nothing of a request counts before its key has been seen."""

    def __init__(self, method: str, handler: Handler, config: HttpConfig, keys: ApiKeys | None) -> None:
        self.methods = ("GET", "HEAD") if method == "GET" else (method,)
        self._handler = handler
        self._config = config
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        is_head = scope["method"] == "HEAD"
        responder = Responder(send, without_body=is_head, keep_alive_s=self._config.keep_alive_s)
        try:
            await self._answer(scope, headers, receive, responder)
        except ClientGone:
            return
        except Exception as error:
            await responder.fail(error)

    async def _answer(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, responder: Responder
    ) -> None:
        if self._keys is not None:
            self._keys.check(headers.get(b"authorization", b""))
        if scope["method"] not in self.methods:
            allow = ((b"allow", ", ".join(self.methods).encode()),)
            message = f"{scope['path']} takes {' and '.join(self.methods)}, not {scope['method']}"
            raise HttpError(405, message, code="method_not_allowed", headers=allow)
        call = Call(headers=headers, path=scope["path_params"])
        if "GET" in self.methods:
            await responder.reply(await self._handler(call))
            return
        call.body = await read_body(receive, headers, self._config.max_body_bytes)
        async with DisconnectGuard(receive):
            await responder.reply(await self._handler(call))


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytearray:
    """The whole body. Raises HttpError 413 as soon as it is known to be longer than `limit` bytes, or ClientGone."""
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and len(announced) < 20 and int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return body


def _too_large(limit: int) -> HttpError:
    # No "connection: close": the server would reset the connection while the client still sends, and the client would
    # see that instead of this answer. Servers drop the rest of a body that the application does not read.
    return HttpError(413, f"The body is longer than {limit} bytes, the most that is allowed", code="request_too_large")


class NotFound:
    """What is no route: it says which there are. Under /v1 nobody learns so without a key, where there are any."""

    def __init__(self, keys: ApiKeys | None, routes: list[str]) -> None:
        """`routes`: method and path of each."""
        self._keys = keys
        self._routes = ", ".join(routes).replace(":path}", "}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        message = f"{scope['method']} {scope['path'][:MAX_PATH_CHARS]} is not supported; this server has {self._routes}"
        error = HttpError(404, message, code="not_found")
        try:
            if self._keys is not None and f"{path}/".startswith("/v1/"):
                self._keys.check(dict(scope["headers"]).get(b"authorization", b""))
        except HttpError as refused:
            error = refused
        await Responder(send, without_body=scope["method"] == "HEAD").fail(error)
