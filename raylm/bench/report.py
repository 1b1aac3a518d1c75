"""Results: one JSON line each on stdout (and in a file), a table on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from raylm.errors import ConfigError
from raylm.sim.report import SimResult

Cell = str | int | float | dict[str, float] | None

# Columns of the JSON lines that a table for people leaves out.
_NOT_IN_TABLE = (
    "bench",
    "model",
    "ttft_ms_p90",
    "itl_ms_p90",
    "tpot_ms_p90",
    "e2e_ms_p90",
    "phases",
    "trace",
    "prefix_hit_rate",
    "kernels_us",
    "peaks",
)


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """A throughput or latency case. `seconds` is the median of the repetitions."""

    bench: str
    model: str
    case: str
    requests: int
    input_len: int | str
    output_len: int | str
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    output_len_mean: float | None = None
    """Only where the output lengths differ."""
    sampling: str | None = None
    """How it was sampled, where that was said."""
    settings: str | None = None
    """Of a sweep: what was set, as in scheduler.max_num_seqs=16."""


@dataclass(frozen=True, slots=True)
class ServeResult(OfflineResult):
    """A case against a server; times in milliseconds, goodput in requests/s (None where no limit was asked for)."""

    concurrency: int = 0
    request_rate: float | str = "inf"
    ttft_ms_p50: float | None = None
    ttft_ms_p90: float | None = None
    ttft_ms_p99: float | None = None
    itl_ms_p50: float | None = None
    itl_ms_p90: float | None = None
    itl_ms_p99: float | None = None
    tpot_ms_p50: float | None = None
    tpot_ms_p90: float | None = None
    tpot_ms_p99: float | None = None
    e2e_ms_p50: float | None = None
    e2e_ms_p90: float | None = None
    e2e_ms_p99: float | None = None
    goodput: float | None = None
    failed: int = 0
    hit_rate: float | None = None
    """Of the prompts' tokens those that the server had in its prefix cache, where it says so."""


@dataclass(frozen=True, slots=True)
class FailedPoint:
    """A point of a sweep at which nothing could be measured, and why."""

    bench: str
    model: str
    settings: str
    unavailable: str


@dataclass(frozen=True, slots=True)
class StartupResult:
    """Seconds from starting a process to its first answer, and what they went into."""

    bench: str
    model: str
    ready_s: float
    phases: dict[str, float]


@dataclass(frozen=True, slots=True)
class CompareResult:
    """raylm against another program on the same case; where it could not run, `unavailable` says why."""

    bench: str
    case: str
    against: str
    raylm_tokens_per_s: float
    other_tokens_per_s: float | None
    ratio: float | None
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class SchedulerResult:
    """The scheduler's own time for a step in which every running request decodes: medians, and what they may be."""

    bench: str
    running: int
    waiting: int
    us_per_step: float
    us_encode: float
    asked_us_per_step: float | None
    asked_us_encode: float | None


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """A prompt looked up in a prefix cache that holds it: the first time, which hashes it, and again."""

    bench: str
    prompt_len: int
    ms_cold: float
    ms_warm: float
    asked_ms: float | None


@dataclass(frozen=True, slots=True)
class TraceResult:
    """Decode steps of `batch` rows on a GPU: microseconds a step, without the profiler and with it; the share of the
    time in which no kernel ran (with it); and microseconds a step by kernel."""

    bench: str
    model: str
    batch: int
    us_per_step: float
    us_per_step_profiled: float
    gpu_idle_share: float
    kernels_per_step: float
    kernels_us: dict[str, float]
    peaks: dict[str, float] | None = None
    """What the device did at its best, beside: bytes_per_s read and flops_per_s."""


@dataclass(frozen=True, slots=True)
class TouchedResult:
    """Experts that a decode step of `batch` rows goes to, of `experts`, in a layer on average; how many they would be
    at random; and the former's share of the latter."""

    bench: str
    model: str
    batch: int
    experts: int
    touched: float
    at_random: float
    share: float


@dataclass(frozen=True, slots=True)
class KindResult:
    """Kernels of one kind in a step of `batch` rows: microseconds, launches, what they have to move and compute at
    least, how much of the time that would take the device at its best (`roofline_share`), and how much of the time its
    memory has nothing to do (`memory_idle_us`)."""

    bench: str
    model: str
    batch: int
    kind: str
    us: float
    kernels: float
    mb: float
    gflop: float
    roofline_share: float
    memory_idle_us: float


@dataclass(frozen=True, slots=True)
class AllReduceResult:
    """A sum of `bytes` over `ranks` GPUs: microseconds a call in a CUDA graph."""

    bench: str
    ranks: int
    bytes: int
    us_one_shot: float
    us_two_shot: float
    us_nccl: float


@dataclass(frozen=True, slots=True)
class GatherResult:
    """An all-gather of logits over `ranks` GPUs: `rows` of 128,256 columns, split by column. Microseconds in a CUDA
    graph."""

    bench: str
    ranks: int
    rows: int
    us_nccl: float
    us_peer: float


@dataclass(frozen=True, slots=True)
class SumNormResult:
    """A sum of `rows` of 4,096 over `ranks` GPUs and the norm behind it, microseconds in a CUDA graph: by NCCL and a
    norm, by the fastest sum of so many bytes and a norm, in one kernel where every rank norms all rows, and in one
    where each norms its share."""

    bench: str
    ranks: int
    rows: int
    us_nccl: float
    us_apart: float
    us_at_once: float
    us_split: float


@dataclass(frozen=True, slots=True)
class StepsResult:
    """The step channel between an engine and `workers` processes: microseconds from a plan to its result when workers
    take no time, and what is added to a step of `device_us` when two plans are in flight."""

    bench: str
    workers: int
    plan: str
    us_round_trip: float
    device_us: float
    us_added: float


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """Speculative decoding against plain decoding, in turns. `acceptance`: accepted drafts over verified ones;
    `accepted_per_step`: of a row's verification. `same_outputs`: share of outputs equal to the plain ones. `ratio` is
    of whole runs, with their prompts and with streams that end later than others; `decode_ratio` of the time in which
    all streams decode."""

    bench: str
    model: str
    method: str
    kind: str
    streams: int
    requests: int
    output_tokens: int
    plain_tokens_per_s: float
    tokens_per_s: float
    ratio: float
    decode_ratio: float | None
    acceptance: float | None
    accepted_per_step: float | None
    drafted: int
    same_outputs: float


@dataclass(frozen=True, slots=True)
class StructureResult:
    """Requests with JSON schemas against plain ones of the same lengths, in turns, `streams` at a time. `time_ratio`:
    the time of the former over that of the latter."""

    bench: str
    model: str
    schemas: int
    streams: int
    output_len_mean: float
    tokens_per_s: float
    plain_tokens_per_s: float
    time_ratio: float


Result = (
    OfflineResult
    | ServeResult
    | FailedPoint
    | StartupResult
    | CompareResult
    | SchedulerResult
    | PrefixResult
    | TraceResult
    | TouchedResult
    | KindResult
    | AllReduceResult
    | GatherResult
    | SumNormResult
    | StepsResult
    | SpeculationResult
    | StructureResult
    | SimResult
)


def as_json(result: Result) -> dict[str, Cell]:
    """The keys of one JSON line: every field of the result, less the optional ones that say nothing here."""
    row: dict[str, Cell] = dataclasses.asdict(result)
    for optional in ("output_len_mean", "sampling", "settings", "unavailable", "hit_rate", "peaks"):
        if row.get(optional, ...) is None:
            del row[optional]
    return {key: _rounded(value) for key, value in row.items()}


@dataclass(slots=True)
class Report:
    """Where results go: printed as they come, kept for the table."""

    output: Path | None = None
    results: list[Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.output is None:
            return
        try:
            self.output.write_text("", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {str(self.output)!r} cannot be written: {error.strerror}") from None

    def add(self, result: Result) -> None:
        line = json.dumps(as_json(result))
        self.results.append(result)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if self.output is not None:
            with self.output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def print_tables(self) -> None:
        """One table a kind of result, on stderr."""
        console = Console(stderr=True)
        for kind, rows in _by_bench(self.results):
            console.print(_table(kind, rows, console.width))


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the values lie, interpolated linearly; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _by_bench(results: Sequence[Result]) -> Iterator[tuple[str, list[dict[str, Cell]]]]:
    for bench in dict.fromkeys(result.bench for result in results):
        yield bench, [as_json(result) for result in results if result.bench == bench]


def _table(bench: str, rows: list[dict[str, Cell]], width: int) -> Table:
    """A line a result; where so many columns do not fit in `width` characters, a column a result."""
    models = sorted({str(row["model"]) for row in rows if "model" in row})
    title = " ".join([bench, *models])
    rows = [_flat(row) for row in rows]
    names = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[_heading(name) for name in names]]
    lines += [["" if row.get(name) is None else str(row[name]) for name in names] for row in rows]
    narrow = _width(lines) > width
    if narrow:
        lines = [list(column) for column in zip(*lines, strict=True)]
    table = Table(title=title)
    for index, heading in enumerate(lines[0]):
        table.add_column(heading, justify="right", overflow="fold", no_wrap=narrow and index == 0)
    for line in lines[1:]:
        table.add_row(*line)
    return table


def _heading(name: str) -> str:
    return name.replace("_per_s", "/s").replace("_", " ")


def _width(lines: list[list[str]]) -> int:
    """Characters of a table of these cells; a heading may break at its spaces."""
    words = [[max(heading.split(" "), key=len) for heading in lines[0]], *lines[1:]]
    return 1 + sum(3 + max(map(len, column)) for column in zip(*words, strict=True))


def _flat(row: dict[str, Cell]) -> dict[str, Cell]:
    shown = {key: value for key, value in row.items() if key not in _NOT_IN_TABLE}
    phases = row.get("phases")
    if isinstance(phases, dict):
        shown.update(phases)
    return shown


def _rounded(value: Cell) -> Cell:
    if isinstance(value, float):
        return round(value, 4 if abs(value) < 10 else 2)
    if isinstance(value, dict):
        return {key: round(seconds, 4) for key, seconds in value.items()}
    return value
