"""Configuration of how an ingress finds engines for its requests."""

from __future__ import annotations

from pydantic import Field

from raylm.config.base import FrozenConfig


class RoutingConfig(FrozenConfig):
    """What happens to requests while engines come and go."""

    hold_s: float = Field(default=30.0, ge=0)
    """Seconds that a new request waits where no engine serves its model, as while the only one is replaced or a model
    wakes up; then it is refused with 503. 0 refuses at once."""
    max_held_requests: int = Field(default=1024, ge=0)
    """New requests of an ingress that may wait so, for each model; one more is refused with 503."""
    failover_wait_s: float = Field(default=60.0, ge=0)
    """Seconds that a live request whose engine was lost waits for another one to go on; then it ends with an error.
    0 ends it with its engine."""
    max_engine_deaths: int = Field(default=4, ge=1)
    """A request that has been on so many engines when they died ends with an error: it may be what ends them."""
