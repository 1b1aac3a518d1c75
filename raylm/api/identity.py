"""Who asks, and what they may do."""

from __future__ import annotations

from typing import NamedTuple

INFERENCE = "inference"
BATCH = "batch"
ADMIN = "admin"
SCOPES = frozenset({INFERENCE, BATCH, ADMIN})
"""What a key may be good for: asking models, batches of requests, looking after the server."""


class Identity(NamedTuple):
    """tenant: what requests and stored things of one customer share; "" where the server has no keys."""

    tenant: str = ""
    scopes: frozenset[str] = SCOPES
