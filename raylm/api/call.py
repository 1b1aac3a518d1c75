"""A call of an operation, whatever brought it: HTTP, a line of a batch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from raylm.api.identity import Identity
from raylm.generation.record import Record

Events = AsyncGenerator[bytes, None]
"""An answer that is streamed: server-sent events, or lines, as the operation says."""


@dataclass(slots=True)
class Call:
    """One call of an operation.

    body: emptied as soon as it has been read, where it is a bytearray.
    headers: of HTTP, names in small letters. path: the values that stand in the operation's path.
    query: those of the URL's query. started: when it arrived (perf_counter). request_id: what logs call it.
    record: what is remembered of it, where somebody wants that.
    """

    body: bytes | bytearray = b""
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    identity: Identity = Identity()
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    started: float = field(default_factory=perf_counter)
    request_id: str = ""
    record: Record | None = None
