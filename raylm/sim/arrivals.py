"""When requests arrive: one process for the simulator and for load on a real server."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple

Growth = Literal["linear", "exponential"]


class Ramp(NamedTuple):
    """A rate that goes from `start` to `end` requests/s over a run, in time: by equal steps, or by equal factors."""

    start: float
    end: float
    growth: Growth = "linear"

    @property
    def label(self) -> str:
        return f"{self.start:g}-{self.end:g} {self.growth}"

    def at(self, index: float, count: int) -> float:
        """Seconds after which `index` of the run's `count` requests are expected; beyond the run the rate stays."""
        start, end = self.start, self.end
        if math.isclose(start, end):
            return index / start
        inside = min(index, count)
        if self.growth == "linear":
            # The expected count grows with start t + (end - start) t² / 2 T; T is when it is `count`.
            whole = 2 * count / (start + end)
            slope = (end - start) / whole
            seconds = 2 * inside / (start + math.sqrt(max(0.0, start * start + 2 * slope * inside)))
        else:
            # The expected count grows with start T (e^(k t / T) - 1) / k, where k = log(end / start).
            per_log = count / (end - start)
            seconds = per_log * math.log1p(inside / (per_log * start))
        return seconds + (index - inside) / end


def gap(rng: random.Random, burstiness: float = 1.0) -> float:
    """A time between two arrivals, 1 on average, of a gamma distribution with the shape `burstiness`: 1 is a Poisson
    process, less comes in bursts, more at ever more even times (vLLM's bench has the same)."""
    return rng.expovariate(1.0) if burstiness == 1.0 else rng.gammavariate(burstiness, 1 / burstiness)


def arrivals(count: int, rate: float | Ramp | None, seed: int, burstiness: float = 1.0) -> list[float]:
    """Seconds after the start at which `count` requests come; without a rate, all at 0."""
    if rate is None:
        return [0.0] * count
    rng = random.Random(seed)
    times: list[float] = []
    waited = 0.0
    for _ in range(count):
        waited += gap(rng, burstiness)
        times.append(rate.at(waited, count) if isinstance(rate, Ramp) else waited / rate)
    return times
