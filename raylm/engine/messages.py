"""What travels between an ingress and an engine: requests and cancels in, token deltas and refusals out.

msgpack arrays over ZeroMQ. One `Deltas` message per step and ingress, however many requests it carries.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta


class Load(NamedTuple):
    """How busy an engine is; it rides on every Deltas message."""

    running: int
    waiting: int
    kv_usage: float
    num_preemptions: int = 0


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """Generate one sequence. `request_id` is unique among all clients of the engine."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """The client has gone: free the request's blocks now. Nothing is answered."""

    request_id: str


class Deltas(msgspec.Struct, tag="deltas", array_like=True, frozen=True):
    """What a step gave the requests of one client."""

    deltas: list[TokenDelta]
    load: Load


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """A Submit was not taken. `retry_after` is in seconds and set for "overloaded" only."""

    request_id: str
    kind: Literal["rejected", "overloaded"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 0.0


ToEngine = Submit | Abort
FromEngine = Deltas | Refused
