"""The HTTP face as an ASGI application: routes, bodies, answers. A token's chunk costs one send and no task."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import NamedTuple

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from raylm import __version__
from raylm.config.serving import HttpConfig
from raylm.openai.errors import HttpError, http_error
from raylm.openai.metrics import HttpMetrics
from raylm.openai.served_model import ModelCatalog
from raylm.openai.service import Events, OpenAIService
from raylm.serving.keys import ApiKeys
from raylm.serving.streams import DisconnectGuard

Headers = tuple[tuple[bytes, bytes], ...]
_JSON = b"application/json"
_EVENT_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies such as nginx hold a stream's events back otherwise.
    (b"x-accel-buffering", b"no"),
)


def build_http_app(models: ModelCatalog, config: HttpConfig) -> Router:
    """OpenAI's API for the models of a catalog, as an ASGI application. Raises ConfigError when there are no keys in
    `config.api_keys_file`."""
    metrics = HttpMetrics(models)
    service = OpenAIService(models, config, metrics)
    reads, posts = _Reads(models, service, metrics), _Posts(service)

    api_keys = ApiKeys(config.api_keys_file) if config.api_keys_file is not None else None

    def route(path: str, method: str, handler: Handler, keys: ApiKeys | None = api_keys) -> Route:
        return Route(path, Endpoint(method, handler, config.max_body_bytes, keys))

    return Router(
        [
            route("/v1/chat/completions", "POST", posts.chat),
            route("/v1/completions", "POST", posts.complete),
            route("/v1/models", "GET", reads.list_models),
            route("/v1/models/{model:path}", "GET", reads.describe_model),
            # Probes and Prometheus have no key, and nothing of what is asked or answered is in these.
            route("/health", "GET", reads.health, keys=None),
            route("/version", "GET", reads.version, keys=None),
            route("/metrics", "GET", reads.metrics, keys=None),
        ],
        # A redirected POST loses its body with many clients; a plain 404 says what is wrong.
        redirect_slashes=False,
        default=NotFound(api_keys),
    )


class HttpRequest(NamedTuple):
    """`model` is the path's, `body` is empty unless the method is POST."""

    body: bytes
    model: str


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    content_type: bytes = _JSON


Handler = Callable[[HttpRequest], Awaitable[Answer | Events]]


class _Posts:
    def __init__(self, service: OpenAIService) -> None:
        self._service = service

    async def chat(self, request: HttpRequest) -> Answer | Events:
        return _reply(await self._service.chat(request.body))

    async def complete(self, request: HttpRequest) -> Answer | Events:
        return _reply(await self._service.complete(request.body))


def _reply(result: bytes | Events) -> Answer | Events:
    return Answer(result) if isinstance(result, bytes) else result


class _Reads:
    def __init__(self, models: ModelCatalog, service: OpenAIService, metrics: HttpMetrics) -> None:
        self._models = models
        self._service = service
        self._metrics = metrics

    async def list_models(self, request: HttpRequest) -> Answer:
        return Answer(self._service.list_models())

    async def describe_model(self, request: HttpRequest) -> Answer:
        return Answer(self._service.describe_model(request.model))

    async def health(self, request: HttpRequest) -> Answer:
        ready = self._models.ready()
        status = "ok" if ready else "not ready: a model has no engine"
        return Answer(msgspec.json.encode({"status": status}), 200 if ready else 503)

    async def version(self, request: HttpRequest) -> Answer:
        return Answer(msgspec.json.encode({"version": __version__}))

    async def metrics(self, request: HttpRequest) -> Answer:
        return Answer(self._metrics.render(), content_type=CONTENT_TYPE_LATEST.encode())


class ClientGone(Exception):
    """The client left before its request was complete: there is nobody to answer."""


class Endpoint:
    """One route as an ASGI application: it reads the body, calls the handler and sends what that returns or raises.
    With `keys`, nothing of a request counts before its key has been seen."""

    def __init__(self, method: str, handler: Handler, max_body_bytes: int, keys: ApiKeys | None) -> None:
        self._method = method
        self._handler = handler
        self._max_body_bytes = max_body_bytes
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        responder = Responder(send)
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
        if scope["method"] != self._method:
            allow = ((b"allow", self._method.encode()),)
            message = f"{scope['path']} takes {self._method}, not {scope['method']}"
            raise HttpError(405, message, code="method_not_allowed", headers=allow)
        model = scope["path_params"].get("model", "")
        if self._method == "GET":
            await responder.reply(await self._handler(HttpRequest(b"", model)))
            return
        body = await read_body(receive, headers, self._max_body_bytes)
        async with DisconnectGuard(receive):
            await responder.reply(await self._handler(HttpRequest(body, model)))


class Responder:
    """Sends one answer. `started` once its status is out, after which no other can be sent. Serve adds the header
    x-request-id, with the client's own id where that sent one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def reply(self, answer: Answer | Events) -> None:
        if isinstance(answer, Answer):
            await self._whole(answer.status, answer.content_type, answer.body)
        else:
            await self._stream(answer)

    async def fail(self, error: Exception) -> None:
        """Answer with an error; when another answer has begun, the server cuts that one off."""
        problem = http_error(error)
        if not self.started:
            await self._whole(problem.status, _JSON, problem.body(), problem.headers)

    async def _whole(self, status: int, content_type: bytes, body: bytes, headers: Headers = ()) -> None:
        length = str(len(body)).encode()
        await self._start(status, ((b"content-type", content_type), (b"content-length", length), *headers))
        await self._send({"type": "http.response.body", "body": body})

    async def _stream(self, events: AsyncGenerator[bytes, None]) -> None:
        send = self._send
        async with aclosing(events):
            # An error before the first token raises here, and is answered with its own status.
            first = await anext(events)
            await self._start(200, _EVENT_STREAM)
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """The whole body. Raises HttpError 413 as soon as it is known to be longer than `limit` bytes, or ClientGone."""
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and len(announced) < 20 and int(announced) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return b"".join(parts)


def _too_large(limit: int) -> HttpError:
    # No "connection: close": the server would reset the connection while the client still sends, and the client would
    # see that instead of this answer. Servers drop the rest of a body that the application does not read.
    return HttpError(413, f"The body is longer than {limit} bytes, the most that is allowed", code="request_too_large")


class NotFound:
    """What is no route. Under /v1 nobody learns so without a key, where there are any."""

    def __init__(self, keys: ApiKeys | None) -> None:
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        error = HttpError(404, f"There is nothing at {scope['method']} {scope['path']}", code="not_found")
        try:
            if self._keys is not None and f"{path}/".startswith("/v1/"):
                self._keys.check(dict(scope["headers"]).get(b"authorization", b""))
        except HttpError as refused:
            error = refused
        await Responder(send).fail(error)
