"""What is counted of a model's completions, under the bounds of vLLM's histograms.

Everything runs in one event loop, so the counts are plain numbers without locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from time import perf_counter

from prometheus_client.core import HistogramMetricFamily

# Upper bounds in seconds; those of vLLM, so that its dashboards fit.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
E2E_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram:
    """Counts per bucket of values in seconds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class ModelMetrics:
    """The counts of one model."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        """Completions by finish reason; "abort" when the client left, "deadline" when its time was up, "error" when it
        was refused or the engine failed."""
        self.prompt_tokens = 0
        """Of prompts from which something was generated: a prompt that is refused does not count."""
        self.generation_tokens = 0
        self.time_to_first_token = Histogram(TTFT_BOUNDS)
        self.inter_token_latency = Histogram(ITL_BOUNDS)
        self.e2e_latency = Histogram(E2E_BOUNDS)


class ChoiceMeter:
    """Measures one completion, from the moment its HTTP request arrived (`started`, a perf_counter time)."""

    __slots__ = ("_last", "_metrics", "_started")

    def __init__(self, metrics: ModelMetrics, started: float) -> None:
        self._metrics = metrics
        self._started = started
        self._last = 0.0

    def tokens(self, count: int) -> None:
        """One delta of `count` tokens; merged tokens share the time since the last delta."""
        if count == 0:
            return
        now = perf_counter()
        metrics = self._metrics
        if self._last:
            metrics.inter_token_latency.observe((now - self._last) / count, count)
        else:
            metrics.time_to_first_token.observe(now - self._started)
        self._last = now
        metrics.generation_tokens += count

    def finished(self, reason: str) -> None:
        self._metrics.finished[reason] += 1
        self._metrics.e2e_latency.observe(perf_counter() - self._started)
