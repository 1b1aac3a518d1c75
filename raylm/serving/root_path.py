"""The path under which a proxy in front shows the server."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Takes requests with `path` before their own path, as a proxy passes them that changes nothing, and without, as
    one does that takes it off."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        """`path` begins with a slash, and ends with none; "": there is none."""
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._path and scope["type"] != "lifespan" and scope["path"].startswith(f"{self._path}/"):
            # Routes are looked for behind it.
            scope = {**scope, "root_path": self._path}
        await self._app(scope, receive, send)
