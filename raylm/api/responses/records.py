"""Responses as the store takes and gives them."""

from __future__ import annotations

from typing import NamedTuple


class NewResponse(NamedTuple):
    """A response as it begins. `request`, `input` (a list of items) and `body` (the response as clients see it) are
    JSON; of the body `status` does not count, since the store has its own. `streamed`: its events are published."""

    id: str
    tenant: str
    model: str
    status: str
    background: bool
    streamed: bool
    previous_id: str | None
    request: bytes
    input: bytes
    body: bytes


class StoredResponse(NamedTuple):
    """A response as it is stored: `num_events` have been published, `attempts` ingresses have run it before."""

    id: str
    tenant: str
    status: str
    background: bool
    streamed: bool
    previous_id: str | None
    attempts: int
    num_events: int
    request: bytes
    input: bytes
    body: bytes


class Turn(NamedTuple):
    """One response of a conversation: JSON of what was put in and of the response."""

    id: str
    previous_id: str | None
    status: str
    input: bytes
    body: bytes


class Published(NamedTuple):
    """Events of the numbers `first` to `last`, as they are sent."""

    first: int
    last: int
    data: bytes


class Conversation(NamedTuple):
    """Responses that continue each other, oldest first. `missing`: the oldest continues this one, which was deleted or
    has expired. `too_large`: bytes of all, where these are more than were allowed; there are no turns then."""

    turns: list[Turn]
    missing: str | None = None
    too_large: int | None = None
