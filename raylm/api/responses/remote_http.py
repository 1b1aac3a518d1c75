"""The connection to an MCP server: one origin, and answers of bounded size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from raylm.config.mcp import McpConfig


@asynccontextmanager
async def connected(url: str, headers: Mapping[str, str], config: McpConfig) -> AsyncIterator[Client]:
    """A session with the server at `url`. The client follows redirects within the origin of `url` alone."""
    transport = _Bounded(httpx2.AsyncHTTPTransport(), config.max_output_bytes)
    timeout = httpx2.Timeout(config.timeout_s)
    # No proxy of the environment: configuration says where requests go.
    async with httpx2.AsyncClient(headers=dict(headers), timeout=timeout, transport=transport, trust_env=False) as http:
        stream = streamable_http_client(url, http_client=http, max_sse_event_size=config.max_output_bytes)
        async with Client(stream, read_timeout_seconds=config.timeout_s, cache=None) as client:
            yield client


class TooLarge(httpx2.ReadError):
    """An answer is longer than McpConfig allows."""


class _Bounded(httpx2.AsyncBaseTransport):
    """Ends an answer that is too long."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, max_bytes: int) -> None:
        self._inner = inner
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream), "an asynchronous transport"
        response.stream = _BoundedStream(response.stream, self._max_bytes)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._inner = inner
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for part in self._inner:
            count += len(part)
            if count > self._max_bytes:
                raise TooLarge(f"the answer has more than {self._max_bytes} bytes")
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
