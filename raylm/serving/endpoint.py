"""The routes of one path as an ASGI application: keys, methods, bodies, answers. A token's chunk costs one send and no
task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from raylm.api.about import About
from raylm.api.call import Call, Events
from raylm.api.dialect import OPENAI, Dialect
from raylm.api.errors import HttpError
from raylm.api.identity import Identity
from raylm.api.quota import Quota
from raylm.config.serving import HttpConfig
from raylm.generation.record import Record
from raylm.serving.answers import Answer, Headers, Responder
from raylm.serving.identity.callers import Callers
from raylm.serving.identity.keys import check_scope
from raylm.serving.metrics.http_counts import NO_HANDLER, HttpCounts
from raylm.serving.observing.watch import RECORD
from raylm.serving.request_id import request_id
from raylm.serving.streams import DisconnectGuard

MAX_PATH_CHARS = 100
"""How much of an unknown path a message repeats."""


class HttpRoute(NamedTuple):
    """What one method of one path does.

    path: starlette's, with its parameters in braces. scope: what a key must be good for; None: no key is wanted.
    dialect: how the route's API writes errors and streams. is_listed: the answer to an unknown path names it.
    about: what the OpenAPI document says of it; None: nothing. is_counted: it generates, and counts for its tenant.
    """

    method: str
    path: str
    scope: str | None
    run: Callable[[Call], Awaitable[Answer | bytes | Events]]
    dialect: Dialect = OPENAI
    is_listed: bool = True
    about: About | None = None
    is_counted: bool = False


class ClientGone(Exception):
    """The client left before its request was complete: there is nobody to answer."""


class Endpoint:
    """The routes of one path: it reads the body, runs the method's route and sends what that returns or raises.
    Where `callers` have keys, nothing of a request counts before its key has been seen."""

    def __init__(
        self, routes: Sequence[HttpRoute], config: HttpConfig, callers: Callers, counts: HttpCounts | None = None
    ) -> None:
        self.routes = {route.method: route for route in routes}
        self.methods = tuple(self.routes)
        if "GET" in self.routes:
            self.routes["HEAD"] = self.routes["GET"]
            self.methods = ("GET", "HEAD", *(method for method in self.methods if method != "GET"))
        self._first = routes[0]
        self._config = config
        self._session_header = config.session_header.encode()
        self._callers = callers
        self._counts = counts or HttpCounts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = perf_counter()
        headers = dict(scope["headers"])
        responder = Responder(
            send,
            request_id(headers),
            without_body=scope["method"] == "HEAD",
            keep_alive_s=self._config.keep_alive_s,
            dialect=self.routes.get(scope["method"], self._first).dialect,
        )
        try:
            await self._answer(scope, headers, receive, responder)
        except ClientGone:
            return
        except Exception as error:
            await responder.fail(error)
        finally:
            responder.count(self._counts, self._first.path, scope["method"], perf_counter() - begin)

    async def _answer(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, responder: Responder
    ) -> None:
        method = scope["method"]
        record: Record | None = scope.get(RECORD)
        if method == "OPTIONS":
            # A preflight of CORS has been answered before; this is a client that asks what there is.
            await responder.reply(Answer(b"", headers=(self._allow("OPTIONS"),)))
            return
        route = self.routes.get(method)
        identity = self._identify(headers, route)
        if route is None:
            message = f"{scope['path'][:MAX_PATH_CHARS]} takes {' and '.join(self.methods)}, not {method}"
            raise HttpError(405, message, code="method_not_allowed", headers=(self._allow(),))
        if record is None and self._wants_route(headers):
            record = Record(responder.request_id, method, scope["path"])
        identity = identity._replace(session=headers.get(self._session_header, b"").decode("latin-1"))
        call = Call(
            headers=headers,
            identity=identity,
            path=scope["path_params"],
            query=dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)),
            request_id=responder.request_id,
            record=record,
        )
        if record is not None:
            record.is_look = route.scope is None
            record.tenant = identity.tenant
        wants_route = record is not None and self._wants_route(headers)
        responder.also = partial(_also, identity.quota, record if wants_route else None)
        if route.is_counted:
            await identity.quota.begin()
        if method == "POST":
            call.body = await read_body(receive, headers, self._config.max_body_bytes)
            if record is not None:
                record.received = perf_counter()
            async with DisconnectGuard(receive):
                await responder.reply(await route.run(call))
            return
        answer = await route.run(call)
        if isinstance(answer, bytes | Answer):
            await responder.reply(answer)
            return
        async with DisconnectGuard(receive):
            await responder.reply(answer)

    def _identify(self, headers: Mapping[bytes, bytes], route: HttpRoute | None) -> Identity:
        """Who asks; where the method has no route, whoever may ask the path's first one."""
        scope = (route or self._first).scope
        if scope is None:
            return Identity()
        identity = self._callers.identify(headers)
        if route is not None:
            check_scope(identity, scope)
        return identity

    def _wants_route(self, headers: Mapping[bytes, bytes]) -> bool:
        when = self._config.route_headers
        return when == "always" or (when == "asked" and b"x-raylm-route" in headers)

    def _allow(self, *more: str) -> tuple[bytes, bytes]:
        return b"allow", ", ".join((*self.methods, *more)).encode()


def _also(quota: Quota, record: Record | None) -> Headers:
    """Headers of every answer: what the caller may still ask for, and where it comes from if somebody wants to know."""
    headers = quota.headers()
    if record is None or not record.engines:
        return headers
    return (*headers, (b"x-raylm-engine", record.engines[-1].encode()), (b"x-raylm-route", record.route.encode()))


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

    def __init__(self, callers: Callers, routes: Sequence[HttpRoute], counts: HttpCounts) -> None:
        self._callers = callers
        self._counts = counts
        self._paths = ", ".join(dict.fromkeys(each.path.replace(":path}", "}") for each in routes if each.is_listed))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        begin = perf_counter()
        headers = dict(scope["headers"])
        responder = Responder(send, request_id(headers), without_body=scope["method"] == "HEAD")
        try:
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if f"{path}/".startswith("/v1/"):
                self._callers.check_key(headers)
            asked = f"{scope['method']} {scope['path'][:MAX_PATH_CHARS]}"
            raise HttpError(404, f"{asked} is not supported; this server has {self._paths}", code="not_found")
        except HttpError as error:
            await responder.fail(error)
        finally:
            responder.count(self._counts, NO_HANDLER, scope["method"], perf_counter() - begin)
