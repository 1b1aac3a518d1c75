"""Configuration of how an ingress finds engines for its requests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raylm.config.base import FrozenConfig

RoutePolicy = Literal["prefix", "load", "round_robin", "power_of_two"]


class RoutingConfig(FrozenConfig):
    """Which engine a request goes to where a model has several, and what happens while engines come and go."""

    policy: RoutePolicy = "prefix"
    """prefix: where the least is to be computed, the request's own prompt included, whose cached beginning is known
    from the engines' events (cache.events); load: where the least is to be computed of what is there already;
    power_of_two: the less busy one of two at random; round_robin: one after the other."""
    prefix_weight: float = Field(default=2.0, ge=0)
    """With prefix, as how many waiting prompt tokens a cached one counts."""
    sequence_tokens: int = Field(default=256, ge=0)
    """As how many waiting prompt tokens a sequence counts that runs or waits: about what its output costs."""
    max_imbalance: float = Field(default=1.25, ge=1)
    """An engine with more sequences than this many times the mean is overloaded, and so is one with more waiting prompt
    tokens than this many times their mean: it gets no request for what it has cached, nor for a session's sake."""
    slack_sequences: int = Field(default=2, ge=1)
    slack_tokens: int = Field(default=8192, ge=0)
    """So many more than the mean are no overload, however small the mean is."""
    max_match_blocks: int = Field(default=512, ge=1, le=65536)
    """Blocks of a prompt that are looked up at most; each costs about a third of a microsecond."""
    max_index_blocks: int = Field(default=262_144, ge=1)
    """Blocks that are remembered of each engine; one takes about 100 bytes."""
    hold_s: float = Field(default=30.0, ge=0)
    """Seconds that a new request waits where no engine serves its model, as while the only one is replaced; then it is
    refused with 503. 0 refuses at once."""
    wake_s: float = Field(default=600.0, gt=0)
    """Seconds that a new request waits for a model that may sleep (min_replicas 0), where that is more than hold_s: as
    long as its start may take. Once a start has failed meanwhile, hold_s counts."""
    max_held_requests: int = Field(default=1024, ge=0)
    """New requests of an ingress that may wait so, for each model; one more is refused with 503."""
    failover_wait_s: float = Field(default=60.0, ge=0)
    """Seconds that a live request whose engine was lost waits for another one to go on; then it ends with an error.
    0 ends it with its engine."""
    max_engine_deaths: int = Field(default=4, ge=1)
    """A request that has been on so many engines when they died ends with an error: it may be what ends them."""
