"""The id of a request: what logs call it, and what its client reads in the header x-request-id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from uuid import uuid4

HEADER = b"x-request-id"
_SANE = re.compile(rb"[!-~]{1,128}")
"""Printable ASCII without spaces: an id goes into log lines and headers."""


def request_id(headers: Mapping[bytes, bytes]) -> str:
    """The request's own id where it is sane, else a new one.

    HAProxy in front, or Serve, gives each request one that brings none, and writes it into the answer: the
    application must not write it once more.
    """
    given = headers.get(HEADER, b"")
    return given.decode("ascii") if _SANE.fullmatch(given) else f"req_{uuid4().hex}"
