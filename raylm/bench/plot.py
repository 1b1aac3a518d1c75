"""Results as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.bench.report import CompareResult, OfflineResult, Result, ServeResult, StartupResult
from raylm.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_plot(path: Path) -> None:
    """Before anything is measured: can this picture be made? Raises ConfigError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path} needs the plot extra: in raylm's repository, pip install -e '.[plot]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {str(path)!r} must end with .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {str(path)!r}: there is no folder {path.parent}")


def draw(results: Sequence[Result], path: Path) -> None:
    """One picture of a benchmark's results: curves over the load for a server, bars otherwise."""
    from matplotlib.figure import Figure

    served = [result for result in results if isinstance(result, ServeResult)]
    figure = Figure(figsize=(12, 4) if served else (7, 4), layout="constrained")
    if served:
        axes = figure.subplots(1, 3)
        _loads(axes[0], served, "output_tokens_per_s", "output tokens/s")
        _loads(axes[1], served, "ttft_ms_p50", "TTFT p50 (ms)")
        _loads(axes[2], served, "itl_ms_p50", "ITL p50 (ms)")
    else:
        _bars(figure.subplots(), results)
    figure.savefig(path, dpi=150)


def _loads(axes: Axes, results: Sequence[ServeResult], field: str, label: str) -> None:
    """One line a case, over the request rate where it varies, else over concurrency."""
    over_rate = len({result.request_rate for result in results}) > 1
    for case in dict.fromkeys(result.case for result in results):
        points = [
            (_rate(result) if over_rate else result.concurrency, getattr(result, field))
            for result in results
            if result.case == case
        ]
        points.sort(key=lambda point: point[0])
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=case)
    axes.set_xlabel("requests/s" if over_rate else "concurrency")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _rate(result: ServeResult) -> float:
    """Where a curve has finite rates, the unlimited one stands at the rate that was reached."""
    return result.requests / result.seconds if isinstance(result.request_rate, str) else result.request_rate


def _bars(axes: Axes, results: Sequence[Result]) -> None:
    unit = "tokens/s"
    for result in results:
        if isinstance(result, OfflineResult):
            axes.bar(f"{result.case}\nraylm", result.output_tokens_per_s, color="tab:blue")
        elif isinstance(result, CompareResult):
            axes.bar(f"{result.case}\n{result.against}", result.other_tokens_per_s or 0.0, color="tab:gray")
        elif isinstance(result, StartupResult):
            _stack(axes, result)
            unit = "seconds"
    axes.set_ylabel(unit)
    axes.grid(axis="y", alpha=0.3)


def _stack(axes: Axes, result: StartupResult) -> None:
    bottom = 0.0
    for phase, seconds in result.phases.items():
        if phase == "stop":
            continue
        axes.bar(result.model, seconds, bottom=bottom, label=phase)
        bottom += seconds
    axes.legend()
