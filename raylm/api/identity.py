"""Who asks, what they may do, and on what terms they are served."""

from __future__ import annotations

from typing import NamedTuple

from raylm.api.quota import UNLIMITED, Quota

INFERENCE = "inference"
BATCH = "batch"
ADMIN = "admin"
SCOPES = frozenset({INFERENCE, BATCH, ADMIN})
"""What a key may be good for: asking models, batches of requests, looking after the server."""


class Terms(NamedTuple):
    """How a request is scheduled, whatever it asks for.

    weight: the tenant's, for fair scheduling; None: the engine knows it.
    best_priority: the lowest number that it may have as its priority.
    deadline_s: the most seconds that it may take.
    salt: what its cached prefixes are named with, beside the client's own cache_salt; None: with that alone.
    user_is_tenant: its field `user` says whose it is.
    """

    weight: float | None = None
    best_priority: int | None = None
    deadline_s: float | None = None
    salt: str | None = None
    user_is_tenant: bool = False


class Identity(NamedTuple):
    """tenant: what requests and stored things of one customer share; "" where the server has no keys. quota: what the
    tenant may still ask for. session: what the caller names the conversation."""

    tenant: str = ""
    scopes: frozenset[str] = SCOPES
    terms: Terms = Terms()
    quota: Quota = UNLIMITED
    session: str = ""
