"""The table of docs/metrics.md, from what there is.

python -m tests.serving.metrics_table        writes it anew
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from raylm.api.engine_metrics import engine_metrics
from raylm.api.exposition import PREFIX, VLLM_NAMES
from raylm.api.metrics import HttpMetrics
from raylm.generation.served_model import EngineStats
from raylm.serving.identity.counts import TenantCounts
from raylm.serving.metrics.http_counts import HttpCounts
from raylm.serving.metrics.route_counts import RouterCounts

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"
_MARK = "<!-- python -m tests.serving.metrics_table -->\n"


class NoModels:
    """A catalog before any engine is known."""

    def stats(self) -> list[EngineStats]:
        return []


def metrics() -> list[tuple[Metric, tuple[str, ...]]]:
    """Every metric that a scrape may have, with its labels."""
    tenants = TenantCounts()
    tenants.of("some")
    of_ingresses = [HttpMetrics(NoModels()), RouterCounts(list), tenants, HttpCounts()]
    process = ProcessCollector(registry=CollectorRegistry())
    found = [
        *((metric, ("ingress",)) for collector in (*of_ingresses, process) for metric in collector.collect()),
        *((metric, ()) for metric in engine_metrics([])),
    ]
    return [(metric, (*getattr(metric, "_labelnames", ()), *more)) for metric, more in found]


def names(metric: Metric) -> list[str]:
    """What queries may ask for."""
    if metric.type == "histogram":
        return [f"{metric.name}{end}" for end in ("_bucket", "_sum", "_count")]
    return [f"{metric.name}_total" if metric.type == "counter" else metric.name]


def all_names() -> set[str]:
    """Names that queries may ask for, vLLM's left out."""
    return {name for metric, _ in metrics() for name in names(metric)}


def table() -> str:
    return "\n".join(_lines()) + "\n"


def text() -> str:
    """The whole page with the table of now."""
    before = PATH.read_text(encoding="utf-8").split(_MARK)[0]
    return before + _MARK + table()


def _lines() -> Iterator[str]:
    yield from ("| name | type | labels | meaning | vLLM's |", "| --- | --- | --- | --- | --- |")
    for metric, labels in metrics():
        name = metric.name if metric.type == "histogram" else names(metric)[0]
        is_vllms = metric.name.startswith(PREFIX) and metric.name.removeprefix(PREFIX) in VLLM_NAMES
        shown = ", ".join(f"`{label}`" for label in labels)
        yield f"| `{name}` | {metric.type} | {shown} | {metric.documentation} | {'yes' if is_vllms else ''} |"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
