"""A small HTTP/1.1 client for streamed answers, cheap enough to load a server from the server's own cores.

httpx costs some 100 µs of CPU a chunk, this client 28 (10 on uvloop): it notes one time for all the events of a read.
It speaks what OpenAI-compatible servers answer with: chunked, sized or closed bodies, kept-alive connections.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType
from typing import cast
from urllib.parse import SplitResult, urlsplit

import msgspec

from raylm.bench.sse import Answer, Body, ClientError
from raylm.errors import ConfigError

_MAX_HEAD = 64 * 1024
_NONE: Mapping[str, str] = MappingProxyType({})


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._waiter: asyncio.Future[None] | None = None
        self._body: Body | None = None
        self._head = b""
        self._events = b""
        self._status = 0
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, for uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    async def post(self, request: bytes, answer: Answer) -> None:
        """Send a request and read its answer into `answer`. Raises ClientError."""
        assert self._transport is not None
        self._answer, self._body, self._head, self._events, self._status = answer, None, b"", b"", 0
        self.reusable = False
        if self._transport.is_closing():
            raise ClientError("the connection closed before the request was sent")
        self._waiter = asyncio.get_running_loop().create_future()
        answer.sent = perf_counter()
        self._transport.write(request)
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def answered(self) -> bool:
        """Whether a byte of the answer has come."""
        return bool(self._head)

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        try:
            self._receive(data, now)
        except ClientError as error:
            self._end(error)
        except ValueError:
            self._end(ClientError("the server's answer is not valid HTTP"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._body is not None and self._body.until_close and exc is None:
            self._finish(perf_counter())
        else:
            self._end(ClientError(f"the connection closed before the answer was complete ({exc or 'end of stream'})"))

    def _receive(self, data: bytes, now: float) -> None:
        if self._body is None:
            rest = self._read_head(data)
            if rest is None or self._body is None:
                return
            data = rest
        self._read_events(self._body.feed(data), now)
        if self._body.done:
            self._finish(now)

    def _read_head(self, data: bytes) -> bytes | None:
        """The bytes after the head, or None while it is not complete."""
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > _MAX_HEAD:
                raise ClientError("the server's answer has no end of headers")
            return None
        first, *lines = self._head[:end].split(b"\r\n")
        self._status = int(first.split(b" ", 2)[1])
        pairs = (line.partition(b":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._body = Body(headers)
        self.reusable = headers.get(b"connection", b"").lower() != b"close" and not self._body.until_close
        return self._head[end + 4 :]

    def _read_events(self, data: bytes, now: float) -> None:
        if self._status != 200:
            self._events += data
            return
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._events = (self._events + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._answer.take(event[6:], now)
            elif event.startswith(b"data:"):
                self._answer.take(event[5:], now)

    def _finish(self, now: float) -> None:
        self._answer.finished = now
        if self._status != 200:
            message = self._events[:300].decode(errors="replace")
            self._end(ClientError(f"the server answered {self._status}: {message}"))
        elif not self._answer.complete:
            self._end(ClientError("the stream ended without [DONE]"))
        else:
            self._end(None)

    def _end(self, error: ClientError | None) -> None:
        if error is not None:
            self.close()
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)


class Client:
    """Requests to one server, over as many connections as requests run at a time."""

    def __init__(self, url: str, *, api_key: str | None = None, trusted: ssl.SSLContext | None = None) -> None:
        """`url` is the API's base, such as http://127.0.0.1:8000/v1; `trusted`: who may be there by https, whom the
        system trusts where it is None. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _port_is_valid(parts):
            raise ConfigError(f"--url {url!r} must be a base address such as http://127.0.0.1:8000/v1")
        self._parts = parts
        self._host = parts.hostname
        self._auth = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._trusted = trusted
        self._idle: list[_Connection] = []

    async def stream(
        self, path: str, body: object, *, timeout_s: float, headers: Mapping[str, str] = _NONE, keep_text: bool = False
    ) -> Answer:
        """POST `body` as JSON to base + `path` and read the stream of events. Raises ClientError."""
        request = self._encode(path, msgspec.json.encode(body), headers)
        answer = Answer(text=[] if keep_text else None)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._post(request, answer)
        except TimeoutError:
            raise ClientError(f"no complete answer within {timeout_s:g} s") from None
        except OSError as error:
            raise ClientError(f"no connection to {self._parts.netloc}: {error}") from None
        if connection.reusable:
            self._idle.append(connection)
        return answer

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _post(self, request: bytes, answer: Answer) -> _Connection:
        while True:
            connection = self._take_idle()
            reused = connection is not None
            connection = connection or await self._connect()
            try:
                await connection.post(request, answer)
                return connection
            except ClientError:
                # A server may close a kept-alive connection just as the next request goes out: not its failure.
                if not reused or connection.answered:
                    raise
            finally:
                if not connection.reusable:
                    connection.close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        secure = self._parts.scheme == "https"
        context = (self._trusted or ssl.create_default_context()) if secure else None
        port = self._parts.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, port, ssl=context)
        return connection

    def _encode(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"POST {self._parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {self._parts.netloc}\r\n"
            f"{self._auth}{more}Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def _port_is_valid(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False
