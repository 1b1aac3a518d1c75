"""What travels between an ingress and an engine: requests and cancels in, their admission, token deltas, refusals and
block events out.

msgpack arrays over ZeroMQ. One `Deltas` message per step and ingress, however many requests it carries.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from raylm.core.events import EventBatch, EventSnapshot
from raylm.core.load import Load
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """Generate one sequence for each id from the same prompt. Ids are unique among all clients of the engine."""

    request_ids: Annotated[list[str], msgspec.Meta(min_length=1)]
    prompt_ids: list[int]
    params: SamplingParams
    options: RequestOptions


class Follow(msgspec.Struct, tag="follow", array_like=True, frozen=True):
    """Answer with a BlockSnapshot, then send BlockEvents, until an Abort of this id. Again: send a new snapshot."""

    request_id: str


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """The client has gone: free this sequence's blocks now, or end this Follow. Nothing is answered."""

    request_id: str


class Taken(msgspec.Struct, tag="taken", array_like=True, frozen=True):
    """Submits, each named by its first id, that the engine has taken into its queue."""

    request_ids: list[str]


class Deltas(msgspec.Struct, tag="deltas", array_like=True, frozen=True):
    """What a step gave the sequences of one client."""

    deltas: list[TokenDelta]
    load: Load


class BlockSnapshot(msgspec.Struct, tag="snapshot", array_like=True, frozen=True):
    """The blocks that can be found now, for one Follow; it replaces what was sent before."""

    request_id: str
    snapshot: EventSnapshot


class BlockEvents(msgspec.Struct, tag="events", array_like=True, frozen=True):
    """What a step did to the cached blocks, for one Follow."""

    request_id: str
    batch: EventBatch


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """A Submit (named by its first id) or a Follow was not taken. `retry_after` is in seconds and set for "overloaded"
    only."""

    request_id: str
    kind: Literal["rejected", "overloaded"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float = 0.0


LossKind = Literal["engine_dead", "engine_stopped", "ingress_stalled"]


class Lost(msgspec.Struct, tag="lost", array_like=True, frozen=True):
    """These sequences and Follows of one client have ended, without another delta; the message says why."""

    request_ids: list[str]
    kind: LossKind
    message: str


ToEngine = Submit | Follow | Abort
FromEngine = Taken | Lost | Deltas | BlockSnapshot | BlockEvents | Refused
