"""CORS: which web pages may call the server from a browser. Closed unless origins are configured."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from raylm.api.errors import HttpError
from raylm.serving.answers import Responder

METHODS = ("GET", "HEAD", "POST")
EXPOSED = ("x-request-id", "retry-after", "x-should-retry")
"""Headers of an answer that a page's script may read."""


class Cors:
    """Answers preflights, and marks the answers of `app` that an origin may read.

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
        problem = self._problem(scope)
        if problem is not None:
            await Responder(send).fail(problem)
        else:
            await self._allowing(scope, receive, send)

    def _problem(self, scope: Scope) -> HttpError | None:
        """Why a preflight is refused. Other requests are answered: whether a page may see that is the browser's
        business."""
        if scope["type"] != "http" or scope["method"] != "OPTIONS":
            return None
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"").decode("latin-1")
        method = headers.get(b"access-control-request-method", b"").decode("latin-1")
        if not origin or not method:
            return None
        vary = ((b"vary", b"origin"),)
        if origin not in self._origins and "*" not in self._origins:
            message = f"Web pages of {origin} may not call this server: http.cors_origins does not list it"
            return HttpError(403, message, code="origin_not_allowed", headers=vary)
        if method not in METHODS:
            message = f"Web pages may use {', '.join(METHODS)}, not {method}"
            return HttpError(405, message, code="method_not_allowed", headers=vary)
        return None
