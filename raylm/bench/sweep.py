"""The same cases under many settings of the engine, each point with a fresh engine or a fresh server."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from raylm.bench.report import FailedPoint, OfflineResult, ServeResult
from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError, RaylmError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from raylm.bench.cases import Case, Dataset

Settings = Mapping[str, object]
"""Values by dotted keys of EngineConfig, such as scheduler.max_num_seqs."""
_FAILURES = (RaylmError, RuntimeError, MemoryError)
"""A device that has too little memory raises what is no error of raylm's."""
Found = OfflineResult | ServeResult | FailedPoint


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration of the sweep, and what is set in it."""

    settings: Settings
    config: EngineConfig

    @property
    def label(self) -> str:
        return " ".join(f"{key}={'null' if value is None else value}" for key, value in self.settings.items())


def read_grid(words: Sequence[str], path: str | None) -> list[Settings]:
    """The points of `--set key=a,b,c`, all combinations, and of a file: a mapping of keys to lists (all combinations
    too), or a list of mappings, a point each. Raises ConfigError."""
    if bool(words) == (path is not None):
        raise ConfigError("a sweep needs --set KEY=A,B,... (repeatable), or --grid FILE, and not both")
    if path is None:
        return _combined(dict(map(_set, words)))
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--grid {path!r} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--grid {path!r} is not YAML: {error}") from None
    if isinstance(data, list) and data and all(isinstance(point, dict) and point for point in data):
        return [{str(key): value for key, value in point.items()} for point in data]
    if isinstance(data, dict) and data and all(isinstance(values, list) and values for values in data.values()):
        return _combined({str(key): values for key, values in data.items()})
    raise ConfigError(f"--grid {path!r} must map keys to lists of values, or be a list of mappings, a point each")


def make_points(base: EngineConfig, grid: Sequence[Settings]) -> list[Point]:
    """Every point's configuration, checked before anything runs. Raises ConfigError."""
    return [Point(settings, _configured(base, settings)) for settings in grid]


def sweep_offline(
    points: Sequence[Point], cases: Sequence[Case | Dataset], emit: Callable[[Found], None], *, seed: int, repeat: int
) -> None:
    """Each case as one batch, offline; a point that cannot run is emitted as a FailedPoint."""
    from raylm.bench.offline import run_case
    from raylm.llm import LLM

    for point in points:
        try:
            with closing(LLM(point.config)) as llm:
                for case in cases:
                    result = run_case(llm, case, "throughput", seed=seed, repeat=repeat)
                    emit(replace(result, bench="sweep", settings=point.label))
        except _FAILURES as error:
            emit(_failed(point, error))


def sweep_servers(
    points: Sequence[Point],
    measure: Callable[[str, str, Callable[[ServeResult], None]], None],
    emit: Callable[[Found], None],
    *,
    timeout_s: float,
) -> None:
    """A fresh `raylm serve` a point; `measure(url, model, emit)` puts load on it. It has `timeout_s` to start."""
    from raylm.bench.startup import running_server

    for point in points:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "engine.yaml"
            path.write_text(yaml.safe_dump(point.config.model_dump(mode="json")), encoding="utf-8")

            def told(result: ServeResult, label: str = point.label) -> None:
                emit(replace(result, bench="sweep", settings=label))

            try:
                with running_server(str(path), timeout_s=timeout_s) as (url, model):
                    measure(url, model, told)
            except RaylmError as error:
                emit(_failed(point, error))


def draw_sweep(points: Sequence[Point], results: Sequence[Found], path: Path) -> None:
    """Curves over the first key, a line for each case and combination of the others."""
    from matplotlib.figure import Figure

    measured = [result for result in results if not isinstance(result, FailedPoint)]
    settings = {point.label: point.settings for point in points}
    panels = [("output_tokens_per_s", "output tokens/s")]
    if any(isinstance(result, ServeResult) for result in measured):
        panels += [("ttft_ms_p50", "TTFT p50 (ms)"), ("itl_ms_p50", "ITL p50 (ms)")]
    figure = Figure(figsize=(4.5 * len(panels) + 1, 4), layout="constrained")
    for axes, (field, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _curves(axes, measured, settings, field)
        axes.set_ylabel(label)
    figure.savefig(path, dpi=150)


def _curves(
    axes: Axes, results: Sequence[OfflineResult | ServeResult], settings: Mapping[str, Settings], field: str
) -> None:
    first = next(iter(next(iter(settings.values()))))
    lines: dict[str, list[tuple[object, float]]] = {}
    for result in results:
        if (y := getattr(result, field, None)) is None or result.settings is None:
            continue
        values = dict(settings[result.settings])
        x = values.pop(first, None)
        line = ", ".join([result.case, *_load_words(result), *(f"{key}={value}" for key, value in values.items())])
        lines.setdefault(line, []).append((x, y))
    numbers = all(isinstance(x, int | float) for line in lines.values() for x, _ in line)
    for name, points in lines.items():
        xs: list[Any] = [x if numbers else str(x) for x, _ in points]
        axes.plot(xs, [y for _, y in points], marker="o", label=name)
    axes.set_xlabel(first)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=7)


def _load_words(result: OfflineResult | ServeResult) -> list[str]:
    return [f"{result.concurrency} at a time, {result.request_rate}/s"] if isinstance(result, ServeResult) else []


def _failed(point: Point, error: Exception) -> FailedPoint:
    return FailedPoint("sweep", point.config.model.served_name, point.label, str(error) or type(error).__name__)


def _set(word: str) -> tuple[str, list[object]]:
    key, equals, values = word.partition("=")
    if not (key and equals and values):
        raise ConfigError(f"--set {word!r} must be KEY=A,B,..., as in scheduler.max_num_seqs=16,64")
    try:
        return key, [yaml.safe_load(value) for value in values.split(",")]
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {word!r}: a value is not YAML: {error}") from None


def _combined(values: Mapping[str, Sequence[object]]) -> list[Settings]:
    return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def _configured(base: EngineConfig, settings: Settings) -> EngineConfig:
    data = base.model_dump()
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        inner = data.get(section)
        if not dot or not isinstance(inner, dict):
            raise ConfigError(f"{key!r} must be a section and a key of an engine's configuration, as cache.block_size")
        inner[name] = value
    return parse(EngineConfig, data, source="raylm bench sweep")
