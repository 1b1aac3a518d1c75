"""How an API writes what stands around its answers: errors, and the stream that carries its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from raylm.api.errors import ErrorBody, HttpError


class Dialect(NamedTuple):
    """error_body: the body of an error, from the error and the request's id. error_type: what that holds.

    stream_type: the content type of a stream. heartbeat: what a stream sends that has had nothing to say for a while;
    empty: nothing.
    """

    error_body: Callable[[HttpError, str], bytes]
    error_type: type[msgspec.Struct]
    stream_type: bytes = b"text/event-stream; charset=utf-8"
    heartbeat: bytes = b": keep-alive\n\n"
    """Clients of server-sent events skip lines that begin with a colon."""


def _openai_body(error: HttpError, request_id: str) -> bytes:
    return error.body()


OPENAI = Dialect(_openai_body, ErrorBody)


class AnthropicError(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct):
    error: AnthropicError
    request_id: str | msgspec.UnsetType = msgspec.UNSET
    type: str = "error"


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: HttpError, request_id: str = "") -> bytes:
    """{"type": "error", "error": {"type", "message"}, "request_id"}; without a request's id the last is left out."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    return msgspec.json.encode(
        AnthropicErrorBody(AnthropicError(kind, error.message()), request_id if request_id else msgspec.UNSET)
    )


ANTHROPIC = Dialect(anthropic_body, AnthropicErrorBody, heartbeat=b'event: ping\ndata: {"type":"ping"}\n\n')


class OllamaErrorBody(msgspec.Struct):
    error: str


def ollama_body(error: HttpError, request_id: str = "") -> bytes:
    """{"error": message}."""
    return msgspec.json.encode(OllamaErrorBody(error.message()))


OLLAMA = Dialect(ollama_body, OllamaErrorBody, stream_type=b"application/x-ndjson", heartbeat=b"")
