"""The errors that HAProxy answers by itself, in OpenAI's form, as files that it reads when it starts."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

RETRY_S = 2
"""Retry-After of what may be over soon: about what a successor of a dead ingress or HAProxy needs."""


class FrontError(NamedTuple):
    """An answer without a server. `retry` says so to clients that wait for Retry-After."""

    reason: str
    message: str
    kind: str
    code: str
    retry: bool = False

    def body(self) -> str:
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return json.dumps({"error": error})

    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **({"Retry-After": str(RETRY_S)} if self.retry else {})}


_INVALID, _SERVER = "invalid_request_error", "server_error"
ERRORS = {
    400: FrontError("Bad Request", "The request is not valid HTTP", _INVALID, "bad_request"),
    408: FrontError(
        "Request Timeout", "The request did not arrive whole in the time for it", _INVALID, "request_timeout"
    ),
    413: FrontError("Payload Too Large", "The request is larger than allowed", _INVALID, "request_too_large"),
    429: FrontError(
        "Too Many Requests", "This address has too many requests open", "rate_limit_error", "too_many_requests", True
    ),
    500: FrontError("Internal Server Error", "The server had an internal error", _SERVER, "internal_error", True),
    501: FrontError("Not Implemented", "The server does not know this method", _INVALID, "not_implemented"),
    502: FrontError("Bad Gateway", "The request's ingress died before it answered", _SERVER, "bad_gateway", True),
    503: FrontError("Service Unavailable", "No ingress can take the request now", _SERVER, "unavailable", True),
    504: FrontError(
        "Gateway Timeout", "The request's ingress did not answer in time", _SERVER, "gateway_timeout", True
    ),
}
"""By status; those that HAProxy may give."""


def write_error_files(folder: str) -> None:
    """One file a status in `folder`, which is made: STATUS.http, a whole answer."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for status, error in ERRORS.items():
        body = error.body()
        headers = {**error.headers(), "Content-Length": str(len(body)), "Cache-Control": "no-cache"}
        lines = [f"HTTP/1.1 {status} {error.reason}", *(f"{name}: {value}" for name, value in headers.items())]
        with open(os.path.join(folder, f"{status}.http"), "w", newline="") as file:
            file.write("\r\n".join([*lines, "", body]))
