"""Errors as OpenAI's clients expect them: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math

import msgspec

from raylm.errors import DeadlineExceeded, GenerationFailed, Overloaded, RaylmError, RequestLost, RequestRejected
from raylm.log import get_logger

log = get_logger(__name__)

MAX_MESSAGE_CHARS = 2000
"""A message may quote what the client sent, and that may be megabytes."""
ENGINE_RETRY_S = 2
"""Retry-After when an engine died or was stopped: about what a router needs to move on to another one."""


class HttpError(RaylmError):
    """An answer that is an error: its status, OpenAI's fields, and headers such as Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    def message(self) -> str:
        """What went wrong, cut where it gets long."""
        message = str(self)
        return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."

    def body(self) -> bytes:
        """The JSON body, as OpenAI's clients read it."""
        return msgspec.json.encode(ErrorBody(Error(self.message(), self.kind, self.param, self.code)))


class Error(msgspec.Struct):
    """`param` is the field that is wrong, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """How OpenAI writes an error."""

    error: Error


def http_error(error: Exception, request_id: str = "") -> HttpError:
    """The answer to any exception. One that raylm did not raise on purpose is logged, under the request's id, and
    becomes a plain 500."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestRejected):
        return HttpError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, Overloaded):
        return _unavailable(error, "overloaded", math.ceil(error.retry_after))
    if isinstance(error, DeadlineExceeded):
        # OpenAI's clients try a 5xx again by themselves: what that gives comes after the deadline.
        headers = ((b"x-should-retry", b"false"),)
        return HttpError(504, str(error), kind="timeout_error", code="deadline_exceeded", headers=headers)
    if isinstance(error, GenerationFailed):
        return HttpError(500, str(error), kind="server_error", code="generation_failed")
    if isinstance(error, RequestLost):
        return _unavailable(error, error.code, ENGINE_RETRY_S)
    log.error("unexpected error in request %s", request_id or "without an id", exc_info=error)
    return HttpError(
        500, "The server had an internal error; its log has the details", kind="server_error", code="internal_error"
    )


def _unavailable(error: Exception, code: str, retry_after: int) -> HttpError:
    seconds = str(max(1, retry_after)).encode()
    return HttpError(503, str(error), kind="server_error", code=code, headers=((b"retry-after", seconds),))
