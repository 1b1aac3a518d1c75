"""What the HTTP face sends: whole answers, errors and streams of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from starlette.types import Send

from raylm.api.call import Events
from raylm.api.errors import http_error
from raylm.serving.sse import EventSender

Headers = tuple[tuple[bytes, bytes], ...]
_JSON = b"application/json"
_EVENT_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies such as nginx hold a stream's events back otherwise.
    (b"x-accel-buffering", b"no"),
)


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    content_type: bytes = _JSON


class Responder:
    """Sends one answer. `started` once its status is out, after which no other can be sent. Serve adds the header
    x-request-id, with the client's own id where that sent one."""

    def __init__(self, send: Send, *, without_body: bool = False, keep_alive_s: float = 15.0) -> None:
        """`without_body`: the answer to HEAD, which has the headers of the answer to GET. `keep_alive_s`: see
        EventSender."""
        self._send = send
        self._without_body = without_body
        self._keep_alive_s = keep_alive_s
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
        await self._send({"type": "http.response.body", "body": b"" if self._without_body else body})

    async def _stream(self, events: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(events):
            # An error before the first event raises here, and is answered with its own status.
            first = await anext(events)
            await self._start(200, _EVENT_STREAM)
            async with EventSender(self._send, self._keep_alive_s) as sender:
                if first:
                    await sender.send(first)
                async for event in events:
                    await sender.send(event)
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})
