"""The same counts in Ray's own metrics, which every node of a cluster exports."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from raylm.api.exposition import PREFIX, Family

_PREFIX = "raylm_"
_Series = tuple[str, frozenset[tuple[str, str]]]


class RayMetrics:
    """Gauges and counters as they are; of a histogram its sum and its count, as counters."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._shown: dict[_Series, float] = {}

    def show(self, families: list[Family]) -> None:
        """Those whose names begin with raylm's prefix."""
        for family in families:
            if not family.name.startswith(PREFIX):
                continue
            for name, labels, value in family.samples:
                if family.kind == "gauge":
                    self._gauge(_name(name), family.text, labels, value)
                elif name.endswith(("_total", "_sum", "_count")):
                    self._counter(_name(name), family.text, labels, value)

    def _gauge(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(name, text, tuple(labels))
        gauge.set(value, labels)

    def _counter(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = Counter(name, text, tuple(labels))
        series = name, frozenset(labels.items())
        gained = value - self._shown.get(series, 0.0)
        if gained > 0:
            counter.inc(gained, labels)
            self._shown[series] = value


def _name(name: str) -> str:
    # Ray's exporter ends counters' names itself.
    return _PREFIX + name.removeprefix(PREFIX).removesuffix("_total")
