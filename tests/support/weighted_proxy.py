"""A proxy that spreads requests over servers by weights that may be changed at any time, as a Gateway's route does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web


class WeightedProxy:
    """`weights`: of each server, changed by the owner; `asked` and `live`: requests that each has had, and has."""

    def __init__(self, servers: list[str]) -> None:
        """All weight is the first server's."""
        self.weights = [100] + [0] * (len(servers) - 1)
        self.asked = [0] * len(servers)
        self.live = [0] * len(servers)
        self._servers = servers
        self._credits = [0] * len(servers)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The proxy's address, while the block runs."""
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/{path:.*}", self._forward)
        # A client that leaves cancels its handler, which closes the connection to the server.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False
            ) as self._session:
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                (address,) = runner.addresses
                yield f"http://127.0.0.1:{address[1]}"
        finally:
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        place = self._choose()
        self.asked[place] += 1
        self.live[place] += 1
        try:
            url, headers = self._servers[place] + request.path_qs, {"content-type": request.content_type}
            async with self._session.post(url, data=body, headers=headers) as answer:
                response = web.StreamResponse(
                    status=answer.status, headers={"content-type": answer.headers["content-type"]}
                )
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        finally:
            self.live[place] -= 1

    def _choose(self) -> int:
        """Weighted turns: each gains its weight, the richest serves and pays for all."""
        self._credits = [credit + weight for credit, weight in zip(self._credits, self.weights, strict=True)]
        servers = [place for place, weight in enumerate(self.weights) if weight]
        place = max(servers, key=lambda server: self._credits[server])
        self._credits[place] -= sum(self.weights)
        return place
