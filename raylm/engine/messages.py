"""What travels between an ingress and an engine: requests, cancels and orders in, their admission, token deltas,
refusals and block events out.

msgpack arrays over ZeroMQ. One `Deltas` message per step and ingress, however many requests it carries.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from raylm.core.control import Control
from raylm.core.events import EventBatch, EventSnapshot
from raylm.core.load import Load
from raylm.core.options import RequestOptions
from raylm.core.request import Begun
from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """Generate one sequence for each id from the same prompt. Ids are unique among all clients of the engine.

    `begun`: what each of them has from another engine; empty where none has begun. Those that have were admitted there,
    and find room here whatever waits.
    """

    request_ids: Annotated[list[str], msgspec.Meta(min_length=1)]
    prompt_ids: list[int]
    params: SamplingParams
    options: RequestOptions
    begun: list[Begun] = []


class Follow(msgspec.Struct, tag="follow", array_like=True, frozen=True):
    """Answer with a BlockSnapshot, then send BlockEvents, until an Abort of this id. Again: send a new snapshot."""

    request_id: str


class Order(msgspec.Struct, tag="order", array_like=True, frozen=True):
    """Have the engine do something besides requests. Answered with Controlled or Refused; never lasts beyond that."""

    request_id: str
    op: Control


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


class Controlled(msgspec.Struct, tag="controlled", array_like=True, frozen=True):
    """An Order has been carried out: what each worker says of it, by rank; nothing where workers have no part in it."""

    request_id: str
    answers: list[str]


class BlockSnapshot(msgspec.Struct, tag="snapshot", array_like=True, frozen=True):
    """The blocks that can be found now, for one Follow; it replaces what was sent before."""

    request_id: str
    snapshot: EventSnapshot


class BlockEvents(msgspec.Struct, tag="events", array_like=True, frozen=True):
    """What a step did to the cached blocks, for one Follow."""

    request_id: str
    batch: EventBatch


class Busy(msgspec.Struct, tag="busy", array_like=True, frozen=True):
    """How busy the engine is, for a client that follows it: others give it work too."""

    load: Load


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """A Submit (named by its first id), a Follow or an Order was not taken. `retry_after` is in seconds and set for
    "overloaded" only."""

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


ToEngine = Submit | Follow | Order | Abort
FromEngine = Taken | Lost | Deltas | Controlled | BlockSnapshot | BlockEvents | Busy | Refused
