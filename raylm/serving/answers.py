"""What the HTTP face sends: whole answers, errors and streams of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from starlette.types import Send

from raylm.api.call import Events
from raylm.api.dialect import OPENAI, Dialect
from raylm.api.errors import HttpError, http_error
from raylm.serving.metrics.http_counts import HttpCounts
from raylm.serving.sse import EventSender

Headers = tuple[tuple[bytes, bytes], ...]
_JSON = b"application/json"
_UNBUFFERED: Headers = (
    (b"cache-control", b"no-cache"),
    # Proxies such as nginx hold a stream's events back otherwise.
    (b"x-accel-buffering", b"no"),
)


class Answer(NamedTuple):
    body: bytes
    status: int = 200
    content_type: bytes = _JSON
    headers: Headers = ()


class Responder:
    """Sends one answer. `started` once its status is out, after which no other can be sent."""

    def __init__(
        self,
        send: Send,
        request_id: str,
        *,
        without_body: bool = False,
        keep_alive_s: float = 15.0,
        dialect: Dialect = OPENAI,
    ) -> None:
        """`request_id`: what the log calls the request; who stands in front sends it (request_id.py). `without_body`:
        the answer to HEAD, which has the headers of the answer to GET. `keep_alive_s`: see EventSender. `dialect`: how
        errors and streams are written."""
        self.request_id = request_id
        self.started = False
        self.also: Callable[[], Headers] = tuple
        """Headers that any answer has, asked for when it begins."""
        self._status = 0
        self._refused: HttpError | None = None
        self._send = send
        self._without_body = without_body
        self._keep_alive_s = keep_alive_s
        self._dialect = dialect

    async def reply(self, answer: Answer | bytes | Events) -> None:
        if isinstance(answer, bytes):
            await self._whole(Answer(answer))
        elif isinstance(answer, Answer):
            await self._whole(answer)
        else:
            await self._stream(answer)

    async def fail(self, error: Exception) -> None:
        """Answer with an error; when another answer has begun, the server cuts that one off."""
        problem = http_error(error, self.request_id)
        if not self.started:
            self._refused = problem
            body = self._dialect.error_body(problem, self.request_id)
            await self._whole(Answer(body, problem.status, headers=problem.headers))

    def count(self, counts: HttpCounts, handler: str, method: str, seconds: float) -> None:
        """Count the answer, where there was one."""
        if self.started:
            counts.answered(handler, method, self._status, seconds)
        if self._refused is not None:
            counts.refused(handler, self._refused.status, self._refused.code)

    async def _whole(self, answer: Answer) -> None:
        length = str(len(answer.body)).encode()
        headers = ((b"content-type", answer.content_type), (b"content-length", length), *answer.headers)
        await self._start(answer.status, headers)
        await self._send({"type": "http.response.body", "body": b"" if self._without_body else answer.body})

    async def _stream(self, events: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(events):
            # An error before the first event raises here, and is answered with its own status.
            first = await anext(events)
            await self._start(200, ((b"content-type", self._dialect.stream_type), *_UNBUFFERED))
            async with EventSender(self._send, self._keep_alive_s, self._dialect.heartbeat) as sender:
                if first:
                    await sender.send(first)
                async for event in events:
                    await sender.send(event)
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        self._status = status
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.also()]})
