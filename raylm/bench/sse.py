"""What comes back over a stream: the body's bytes, the events in them, and what a request saw of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from raylm.errors import RaylmError


class ClientError(RaylmError):
    """A request failed: no connection, an HTTP error, an error event, or a stream that ended too early."""


# Raw does not take None: a key that is missing leaves its default, null comes as the text "null".
_ABSENT = msgspec.Raw(b"null")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = _ABSENT


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    def has_content(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or _is_given(delta.tool_calls))

    @property
    def said(self) -> str:
        return (self.text if self.delta is None else self.delta.content) or ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = _ABSENT


def _is_given(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"null", b"[]")


_DECODE_CHUNK = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Answer:
    """What one request saw. Times are perf_counter seconds.

    `arrivals` holds the time of every chunk with content, where a chunk may carry several tokens; the count of
    tokens comes from the server's usage (None where it sent none), and so do those of the prompt that its prefix cache
    had. `text` is what was said, where it is kept: a list, which it is not from the start.
    """

    sent: float = 0.0
    finished: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    first_choice: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    text: list[str] | None = None
    complete: bool = False

    def take(self, data: bytes, now: float) -> None:
        """One event's data. Raises ClientError for an error event."""
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            chunk = _DECODE_CHUNK(data)
        except msgspec.DecodeError as error:
            raise ClientError(f"the server sent an event that is no completion chunk: {error}") from None
        if _is_given(chunk.error):
            raise ClientError(f"the server sent an error: {bytes(chunk.error).decode(errors='replace')[:300]}")
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.output_tokens = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            if self.first_choice is None:
                self.first_choice = now
            if choice.has_content():
                self.arrivals.append(now)
                if self.text is not None:
                    self.text.append(choice.said)
                return


class Body:
    """The body of a response, decoded as its bytes come. `feed` returns the payload, `done` says it is complete."""

    def __init__(self, headers: dict[bytes, bytes]) -> None:
        self._chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = headers.get(b"content-length")
        self._left = 0 if self._chunked else int(length) if length is not None else -1
        self._buffer = b""
        self._last = False
        self.until_close = not self._chunked and self._left < 0
        self.done = self._left == 0 and not self._chunked

    def feed(self, data: bytes) -> bytes:
        if self.until_close:
            return data
        if self._chunked:
            return self._feed_chunked(data)
        self._left -= len(data)
        self.done = self._left <= 0
        return data

    def _feed_chunked(self, data: bytes) -> bytes:
        buffer = self._buffer + data if self._buffer else data
        parts = []
        place = 0
        while not self.done:
            line_end = buffer.find(b"\r\n", place)
            if line_end < 0:
                break
            if self._last:
                # After the last chunk come trailers, up to an empty line.
                self.done = line_end == place
                place = line_end + 2
                continue
            size = int(buffer[place:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if size == 0:
                self._last = True
                place = line_end + 2
                continue
            if len(buffer) < end + 2:
                break
            parts.append(buffer[line_end + 2 : end])
            place = end + 2
        self._buffer = buffer[place:]
        return parts[0] if len(parts) == 1 else b"".join(parts)
