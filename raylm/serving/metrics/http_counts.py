"""Requests as HTTP sees them, under the names of prometheus-fastapi-instrumentator, which vLLM's boards read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raylm.api.engine_metrics import add_buckets
from raylm.core.histogram import Histogram

ROUTE_BOUNDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ALL_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0),
    *(7.5, 10.0, 30.0, 60.0),
)
NO_HANDLER = "none"
"""Of a path that is no route: what clients make up must not become labels."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpCounts(Collector):
    """Counts answers by route. `handler` is the route's path with its parameters in braces."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self._refusals: Counter[tuple[str, str, str]] = Counter()
        self._by_route: dict[tuple[str, str], Histogram] = {}
        self._all = Histogram(ALL_BOUNDS)

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An answer has been sent to its end, or cut off; it took so long from the request's arrival."""
        method = method if method in _METHODS else "other"
        self._answers[handler, method, f"{status // 100}xx"] += 1
        histogram = self._by_route.get((handler, method))
        if histogram is None:
            histogram = self._by_route[handler, method] = Histogram(ROUTE_BOUNDS)
        histogram.observe(seconds)
        self._all.observe(seconds)

    def refused(self, handler: str, status: int, reason: str | None) -> None:
        """An answer was an error, with this code."""
        self._refusals[handler, str(status), reason or "invalid_request"] += 1

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "http_requests", "Requests that were answered.", labels=["handler", "method", "status"]
        )
        for labels, count in self._answers.items():
            answers.add_metric(labels, count)
        refusals = CounterMetricFamily(
            "raylm:request_rejections",
            "Requests that were answered with an error, by its code.",
            labels=["handler", "status", "reason"],
        )
        for labels, count in self._refusals.items():
            refusals.add_metric(labels, count)
        by_route = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From a request's arrival to its answer's end, by route.",
            labels=["handler", "method"],
        )
        for (handler, method), histogram in self._by_route.items():
            add_buckets(by_route, [handler, method], histogram.buckets)
        everything = HistogramMetricFamily(
            "http_request_duration_highr_seconds", "From a request's arrival to its answer's end.", labels=[]
        )
        add_buckets(everything, [], self._all.buckets)
        yield from (answers, refusals, by_route, everything)
