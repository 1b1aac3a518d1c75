"""/metrics: what the HTTP face counts, under vLLM's names with the prefix "raylm:".

Everything runs in one event loop, so the counts are plain numbers without locks; prometheus-client only reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raylm.generation.metering import LAG_BOUNDS, Histogram, ModelMetrics
from raylm.generation.served_model import EngineStats, ModelCatalog


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

    def also(self, collector: Collector) -> None:
        """Show what it collects, too."""
        self._registry.register(collector)

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
