"""/metrics: what the HTTP face counts, under vLLM's names with the prefix "raylm:".

Everything runs in one event loop, so the counts are plain numbers without locks; prometheus-client only reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raylm.openai.served_model import EngineStats, ModelCatalog

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


class HttpMetrics(Collector):
    """All counts of one HTTP application, in a registry of its own."""

    def __init__(self, models: ModelCatalog) -> None:
        self._models = models
        self._by_model: dict[str, ModelMetrics] = {}
        self.loop_lag = Histogram(LAG_BOUNDS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def model(self, name: str) -> ModelMetrics:
        """The counts of one model; they start with its first request."""
        metrics = self._by_model.get(name)
        if metrics is None:
            metrics = self._by_model[name] = ModelMetrics()
        return metrics

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._histograms()
        yield from _of_engines(self._models.stats())

    def _counters(self) -> Iterator[Metric]:
        success = CounterMetricFamily(
            "raylm:request_success", "Completions that ended.", labels=["model_name", "finished_reason"]
        )
        prompt = CounterMetricFamily("raylm:prompt_tokens", "Prompt tokens taken in.", labels=["model_name"])
        generation = CounterMetricFamily("raylm:generation_tokens", "Tokens generated.", labels=["model_name"])
        for name, metrics in self._by_model.items():
            for reason, count in metrics.finished.items():
                success.add_metric([name, reason], count)
            prompt.add_metric([name], metrics.prompt_tokens)
            generation.add_metric([name], metrics.generation_tokens)
        yield from (success, prompt, generation)

    def _histograms(self) -> Iterator[Metric]:
        first = _histogram("raylm:time_to_first_token_seconds", "From the request's arrival to its first token.")
        inter = _histogram("raylm:inter_token_latency_seconds", "From one token to the next.")
        e2e = _histogram("raylm:e2e_request_latency_seconds", "From the request's arrival to the completion's end.")
        for name, metrics in self._by_model.items():
            metrics.time_to_first_token.add_to(first, [name])
            metrics.inter_token_latency.add_to(inter, [name])
            metrics.e2e_latency.add_to(e2e, [name])
        lag = HistogramMetricFamily(
            "raylm:event_loop_lag_seconds",
            "How late the ingress's event loop wakes a task, observed ten times a second.",
        )
        self.loop_lag.add_to(lag, [])
        yield from (first, inter, e2e, lag)


def _histogram(name: str, documentation: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, documentation, labels=["model_name"])


_GAUGES = (
    ("running", "raylm:num_requests_running", "Completions that an engine runs now."),
    ("waiting", "raylm:num_requests_waiting", "Completions that wait in an engine."),
    ("waiting_tokens", "raylm:num_prompt_tokens_waiting", "Prompt tokens of the completions that wait in an engine."),
    ("kv_usage", "raylm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is full."),
)
_COUNTERS = (
    ("num_preemptions", "raylm:num_preemptions", "Completions that gave up their place for others."),
    ("num_swaps", "raylm:num_swaps", "Preemptions that copied the KV cache to host memory."),
    ("prefix_queries", "raylm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."),
    ("prefix_hits", "raylm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache."),
)
_DRAFT_COUNTERS = (
    ("num_drafts", "raylm:spec_decode_num_drafts", "Drafts, of one token or several, that were verified."),
    ("num_draft_tokens", "raylm:spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    ("num_accepted_tokens", "raylm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
)


def _of_engines(stats: list[EngineStats]) -> Iterator[Metric]:
    """What each engine last said of itself."""
    labels = ["model_name", "engine"]
    families: list[tuple[str, GaugeMetricFamily | CounterMetricFamily]] = [
        *((field, GaugeMetricFamily(name, text, labels=labels)) for field, name, text in _GAUGES),
        *((field, CounterMetricFamily(name, text, labels=labels)) for field, name, text in _COUNTERS),
    ]
    for field, family in families:
        for engine in stats:
            family.add_metric([engine.model, engine.engine_id], getattr(engine.load, field))
        yield family
    yield from _of_drafts(stats, labels)


def _of_drafts(stats: list[EngineStats], labels: list[str]) -> Iterator[Metric]:
    """Speculative decoding."""
    for field, name, text in _DRAFT_COUNTERS:
        family = CounterMetricFamily(name, text, labels=labels)
        for engine in stats:
            family.add_metric([engine.model, engine.engine_id], getattr(engine.load.drafts, field))
        yield family
    by_position = CounterMetricFamily(
        "raylm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that were accepted, by their position in the draft.",
        labels=[*labels, "position"],
    )
    for engine in stats:
        for position, count in enumerate(engine.load.drafts.accepted_by_position):
            by_position.add_metric([engine.model, engine.engine_id, str(position)], count)
    yield by_position
