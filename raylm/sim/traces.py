"""What arrives when: random traces, the same for the same seed."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from raylm.sim.arrivals import gap

_BURST_S, _PERIOD_S = 1.0, 5.0


class Arrival(NamedTuple):
    """One request. The first `num_shared` tokens of its prompt are those of its tenant's other prompts."""

    at: float
    prompt_len: int
    output_len: int
    num_shared: int
    tenant: str
    priority: int


class Lengths(NamedTuple):
    """Lengths in tokens: `mean` each, or, with a `sigma`, log-normal and cut off at `limit`."""

    mean: int
    sigma: float = 0.0
    limit: int = 1 << 20

    def draw(self, rng: random.Random) -> int:
        length = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(1, round(length)), self.limit)


class Traffic(NamedTuple):
    """What one tenant sends: its share of all requests, and their kind."""

    tenant: str
    share: float
    prompt: Lengths
    output: Lengths
    priority: int = 0


class TraceKind(NamedTuple):
    """A mix of traffic, spread evenly over time (a Poisson process) or all in the first second of every five."""

    traffic: list[Traffic]
    bursts: bool = False


TRACES = {
    "poisson": TraceKind([Traffic("all", 1.0, Lengths(512), Lengths(128))]),
    "bursts": TraceKind([Traffic("all", 1.0, Lengths(512), Lengths(128))], bursts=True),
    "long": TraceKind(
        [
            Traffic("chat", 0.97, Lengths(512), Lengths(128)),
            Traffic("documents", 0.03, Lengths(16384), Lengths(128)),
        ]
    ),
    # The means are those of Kwon et al., SOSP 2023 (161 in, 338 out); the spread is ours.
    "sharegpt": TraceKind([Traffic("all", 1.0, Lengths(161, 1.2, 2048), Lengths(338, 1.0, 2048))]),
    "tenants": TraceKind(
        [
            Traffic("chat", 0.2, Lengths(256, 0.5, 2048), Lengths(128, 0.5, 1024)),
            Traffic("agents", 0.2, Lengths(1024, 0.5, 8192), Lengths(64, 0.5, 1024)),
            Traffic("batch", 0.6, Lengths(1024, 0.5, 8192), Lengths(256, 0.5, 1024), priority=10),
        ]
    ),
}


def make_trace(kind: str, *, rate: float, requests: int, seed: int, prefix_share: float = 0.0) -> list[Arrival]:
    """`requests` arrivals in order, `rate` a second on average; `prefix_share` of each prompt is its tenant's own.

    Another rate moves the same requests closer together or further apart.
    """
    trace = TRACES[kind]
    rng = random.Random(f"{kind}:{seed}")
    shares = [traffic.share for traffic in trace.traffic]
    arrivals = []
    waited = 0.0
    for _ in range(requests):
        waited += gap(rng)
        traffic = rng.choices(trace.traffic, shares)[0]
        prompt_len = traffic.prompt.draw(rng)
        arrivals.append(
            Arrival(
                _in_bursts(waited / rate) if trace.bursts else waited / rate,
                prompt_len,
                traffic.output.draw(rng),
                int(prompt_len * prefix_share),
                traffic.tenant,
                traffic.priority,
            )
        )
    return arrivals


def _in_bursts(at: float) -> float:
    """Squeeze each period into its beginning."""
    periods, rest = divmod(at, _PERIOD_S)
    return periods * _PERIOD_S + rest * _BURST_S / _PERIOD_S
