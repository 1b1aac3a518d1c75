"""CORS: which web pages may call the server from a browser. Closed unless origins are configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from raylm.api.errors import HttpError
from raylm.serving.answers import Responder
from raylm.serving.request_id import request_id

METHODS = ("GET", "HEAD", "POST", "DELETE")
EXPOSED = (
    *("x-request-id", "retry-after", "x-should-retry"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)
"""Headers of an answer that a page's script may read."""
_VARY = ((b"vary", b"origin"),)
_FORM_TYPES = frozenset({b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"})
"""What a page may post to another origin without a preflight: HTML's forms, and bodies without a type."""


class Cors:
    """Answers preflights, marks the answers of `app` that an origin may read, and refuses what a page of another origin
    may send without a preflight.

    The key of a request travels in a header that the page's script sets, so credentials in the sense of CORS (cookies)
    are never allowed, and "*" is safe with API keys.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)
        self._allowing: ASGIApp = app
        if origins:
            # It wraps `send` in a function that looks at the message's type: no task, and no buffer.
            self._allowing = CORSMiddleware(
                app,
                allow_origins=origins,
                allow_methods=METHODS,
                allow_headers=["*"],
                expose_headers=EXPOSED,
                allow_private_network=True,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is not None:
            await Responder(send, request_id(dict(scope["headers"]))).fail(problem)
        else:
            await self._allowing(scope, receive, send)

    def _problem(self, scope: Scope) -> HttpError | None:
        """Why a request of a web page is refused."""
        if scope["method"] not in ("OPTIONS", "POST"):
            return None  # Whether a page may see the answer is the browser's business.
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin:
            return None
        is_allowed = not self._origins.isdisjoint((origin, "*"))
        if scope["method"] == "POST":
            return None if is_allowed or not _needs_no_preflight(headers, origin) else _refused(origin)
        method = headers.get(b"access-control-request-method", b"").decode("latin-1")
        if not method:
            return None
        if not is_allowed:
            return _refused(origin)
        if method not in METHODS:
            message = f"Web pages may use {', '.join(METHODS)}, not {method}"
            return HttpError(405, message, code="method_not_allowed", headers=_VARY)
        return None


def _needs_no_preflight(headers: Mapping[bytes, bytes], origin: str) -> bool:
    """Whether a browser sends this post of another origin's page without asking first: the page cannot read the answer,
    but the server would generate one. Pages of the server itself name its host as their origin."""
    host = headers.get(b"host", b"").decode("latin-1")
    if host and origin.partition("://")[2] == host:
        return False
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return content_type in _FORM_TYPES


def _refused(origin: str) -> HttpError:
    message = f"Web pages of {origin} may not call this server: http.cors_origins does not list it"
    return HttpError(403, message, code="origin_not_allowed", headers=_VARY)
