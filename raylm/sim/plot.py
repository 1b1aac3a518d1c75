"""Simulations as a picture: times over the request rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.errors import ConfigError
from raylm.sim.report import SimResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = (("ttft_ms_p50", "TTFT p50 (ms)"), ("ttft_ms_p99", "TTFT p99 (ms)"), ("itl_ms_p99", "ITL p99 (ms)"))


def check_rates(rates: Sequence[float]) -> None:
    """A curve over the rate needs two. Raises ConfigError."""
    if len(set(rates)) < 2:
        raise ConfigError("--plot draws curves over the request rate: give --rate at least two, such as 5,10,20")


def draw(results: Sequence[SimResult], path: Path) -> None:
    """A row of curves for each tenant (for all requests where there is one), a line for each policy and target."""
    from matplotlib.figure import Figure

    tenants = list(dict.fromkeys(result.tenant for result in results))
    rows = tenants[1:] or tenants
    figure = Figure(figsize=(11, 2.6 * len(rows) + 0.4), layout="constrained")
    grid = figure.subplots(len(rows), len(_COLUMNS), squeeze=False)
    for axes, tenant in zip(grid, rows, strict=True):
        mine = [result for result in results if result.tenant == tenant]
        for one, (field, label) in zip(axes, _COLUMNS, strict=True):
            _curves(one, mine, field, label if len(rows) == 1 else f"{tenant}: {label}")
    grid[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def _curves(axes: Axes, results: Sequence[SimResult], field: str, label: str) -> None:
    for variant in dict.fromkeys(result.variant for result in results):
        points = sorted((result.rate, getattr(result, field)) for result in results if result.variant == variant)
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=variant)
    axes.set_xlabel("requests/s")
    axes.set_title(label, fontsize="medium")
    axes.grid(alpha=0.3)
    if field.startswith("ttft"):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
