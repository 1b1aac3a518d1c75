"""What the HTTP face counts for /metrics, under vLLM's names with the prefix "raylm:".

Everything runs in one event loop, so the counts are plain numbers without locks; prometheus-client only reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raylm.api.engine_metrics import add_buckets, engine_metrics
from raylm.api.exposition import Family, families_of, render
from raylm.core.histogram import Histogram
from raylm.generation.metering import LAG_BOUNDS, ModelMetrics
from raylm.generation.served_model import ModelCatalog

_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    (
        "raylm:time_to_first_token_seconds",
        "From the request's arrival to its first token.",
        lambda counts: counts.time_to_first_token,
    ),
    (
        "raylm:inter_token_latency_seconds",
        "From one token to the next.",
        lambda counts: counts.inter_token_latency,
    ),
    (
        "raylm:time_per_output_token_seconds",
        "From one token to the next; vLLM's older name.",
        lambda counts: counts.inter_token_latency,
    ),
    (
        "raylm:request_time_per_output_token_seconds",
        "A completion's mean time from one token to the next.",
        lambda counts: counts.time_per_output_token,
    ),
    (
        "raylm:e2e_request_latency_seconds",
        "From the request's arrival to the completion's end.",
        lambda counts: counts.e2e_latency,
    ),
    (
        "raylm:request_queue_time_seconds",
        "From the engine's taking a completion in to its first step.",
        lambda counts: counts.queue_time,
    ),
    (
        "raylm:request_prefill_time_seconds",
        "From a completion's first step to its first token.",
        lambda counts: counts.prefill_time,
    ),
    (
        "raylm:request_decode_time_seconds",
        "From a completion's first token to its last.",
        lambda counts: counts.decode_time,
    ),
    (
        "raylm:request_inference_time_seconds",
        "From a completion's first step to its last token.",
        lambda counts: counts.inference_time,
    ),
    ("raylm:request_prompt_tokens", "Tokens of a prompt.", lambda counts: counts.prompt_tokens),
    ("raylm:request_generation_tokens", "Tokens of a completion.", lambda counts: counts.generation_tokens),
    (
        "raylm:request_max_num_generation_tokens",
        "Tokens of the longest of a prompt's completions.",
        lambda counts: counts.longest_tokens,
    ),
    ("raylm:request_params_n", "Completions asked for of a prompt.", lambda counts: counts.asked_n),
    (
        "raylm:request_params_max_tokens",
        "The max_tokens of a prompt's completions, where there is one.",
        lambda counts: counts.asked_max_tokens,
    ),
)


class HttpMetrics(Collector):
    """All counts of one HTTP application, in a registry of its own. Others may add collectors to it."""

    def __init__(self, models: ModelCatalog) -> None:
        self._models = models
        self._by_model: dict[str, ModelMetrics] = {}
        self.loop_lag = Histogram(LAG_BOUNDS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def model(self, name: str) -> ModelMetrics:
        """The counts of one model; they start with its first request."""
        metrics = self._by_model.get(name)
        if metrics is None:
            metrics = self._by_model[name] = ModelMetrics()
        return metrics

    def also(self, collector: Collector) -> None:
        """Show what it collects, too."""
        self._registry.register(collector)

    def own(self) -> list[Family]:
        """What this process counts."""
        return families_of(self._registry.collect())

    def engines(self) -> list[Family]:
        """How busy this process knows engines to be."""
        return families_of(engine_metrics(self._models.stats()))

    async def render(self) -> bytes:
        """What this process knows, in Prometheus' text."""
        return render([*self.own(), *self.engines()])

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        for name, text, of in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            for model, counts in self._by_model.items():
                add_buckets(family, [model], of(counts).buckets)
            yield family
        lag = HistogramMetricFamily(
            "raylm:event_loop_lag_seconds",
            "How late the ingress's event loop wakes a task, observed ten times a second.",
            labels=[],
        )
        add_buckets(lag, [], self.loop_lag.buckets)
        yield lag

    def _counters(self) -> Iterator[Metric]:
        success = CounterMetricFamily(
            "raylm:request_success", "Completions that ended.", labels=["model_name", "finished_reason"]
        )
        prompt = CounterMetricFamily("raylm:prompt_tokens", "Prompt tokens taken in.", labels=["model_name"])
        cached = CounterMetricFamily(
            "raylm:prompt_tokens_cached",
            "Prompt tokens taken in that were found in the prefix cache.",
            labels=["model_name"],
        )
        generation = CounterMetricFamily("raylm:generation_tokens", "Tokens generated.", labels=["model_name"])
        for name, counts in self._by_model.items():
            for reason, count in counts.finished.items():
                success.add_metric([name, reason], count)
            prompt.add_metric([name], counts.num_prompt_tokens)
            cached.add_metric([name], counts.num_cached_tokens)
            generation.add_metric([name], counts.num_generation_tokens)
        yield from (success, prompt, cached, generation)
