"""What the routers of an ingress have decided, held and saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raylm.serving.routing.router import ModelRouter


class RouterCounts(Collector):
    """Of each model, over the routers of its versions."""

    def __init__(self, routers: Callable[[], Iterable[ModelRouter]]) -> None:
        self._routers = routers

    def collect(self) -> Iterator[Metric]:
        decisions: Counter[tuple[str, str]] = Counter()
        prompt, matched, seconds = Counter[str](), Counter[str](), Counter[str]()
        resumed, held = Counter[str](), Counter[str]()
        for router in self._routers():
            counts = router.selector.counts
            for reason, count in counts.by_reason.items():
                decisions[router.name, reason] += count
            prompt[router.name] += counts.prompt_tokens
            matched[router.name] += counts.matched_tokens
            seconds[router.name] += counts.seconds  # type: ignore[assignment]  # A Counter adds floats too.
            resumed[router.name] += router.num_resumed
            held[router.name] += router.num_held
        by_reason = CounterMetricFamily(
            "raylm:routing_decisions", "Engines that were chosen for requests, by why.", labels=["model_name", "reason"]
        )
        for labels, count in decisions.items():
            by_reason.add_metric(labels, count)
        yield by_reason
        for name, text, of in (
            ("raylm:routing_prompt_tokens", "Prompt tokens of requests that were routed.", prompt),
            ("raylm:routing_matched_tokens", "Those of them believed to be in the chosen engine's cache.", matched),
            ("raylm:routing_seconds", "Time that routing took.", seconds),
            ("raylm:requests_resumed", "Completions that went on at another engine when theirs was lost.", resumed),
        ):
            family = CounterMetricFamily(name, text, labels=["model_name"])
            for model, value in of.items():
                family.add_metric([model], value)
            yield family
        gauge = GaugeMetricFamily(
            "raylm:requests_held", "Requests that wait for an engine to be up.", labels=["model_name"]
        )
        for model, value in held.items():
            gauge.add_metric([model], value)
        yield gauge
