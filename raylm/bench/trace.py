"""What a GPU does in steps: which kernels, how long, and how much of the time it waits."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from raylm import ops
from raylm.bench.cases import prompt_token_ids
from raylm.bench.report import KindResult, TraceResult
from raylm.bench.roofline import (
    Peaks,
    StepShape,
    WeightItems,
    decode_shape,
    kind_results,
    kinds_us,
    measure_peaks,
    needs,
    own_us,
    prefill_shape,
)
from raylm.config.engine import EngineConfig
from raylm.config.resolve import resolve
from raylm.core.control import RECORDING, StartProfile, StopProfile
from raylm.core.sampling import SamplingParams
from raylm.engine.engine import Engine
from raylm.engine.factory import offline_engine
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig
from raylm.models.scheme import Scheme, wanted_scheme

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_WARMUP_STEPS = 8
_MAX_NAME = 60


class Span(NamedTuple):
    """One piece of work of the GPU, in microseconds of the trace's clock."""

    name: str
    start: float
    length: float


class Work(NamedTuple):
    """What a trace looks at: `steps` decode steps behind prompts of prompt_len tokens, or the prompts themselves."""

    steps: int
    prompt_len: int
    prefill: bool = False


class Traced(NamedTuple):
    """A step of one batch: the whole, by kind of kernel, and all that ran."""

    result: TraceResult
    kinds: list[KindResult]
    spans: list[Span]


def trace_steps(config: EngineConfig, batches: Sequence[int], work: Work) -> list[Traced]:
    """Run the work for as many requests as each of `batches` says, under torch's profiler; of tensor ranks, look at the
    first.

    Raises ConfigError where there is no GPU, a batch is larger than the engine takes, or no worker has all layers.
    """
    limit = resolve(config, "cuda").scheduler.max_num_seqs
    if max(batches) > limit:
        raise ConfigError(f"a batch of {max(batches)} is over scheduler.max_num_seqs {limit}")
    if config.parallel.pipeline > 1:
        raise ConfigError(f"bench trace looks at one worker, with parallel.pipeline {config.parallel.pipeline} a stage")
    with tempfile.TemporaryDirectory() as folder:
        runtime = config.runtime.model_copy(update={"profile_folder": folder})
        engine = offline_engine(config.model_copy(update={"runtime": runtime}), progress=False)
        try:
            if not engine.info.device.startswith("cuda"):
                raise ConfigError(f"bench trace looks at a GPU's work, but the model runs on {engine.info.device}")
            model = _model(config, getattr(torch, engine.info.dtype))
            return [_trace(engine, batch, work, model) for batch in batches]
        finally:
            engine.shutdown()


class _Model(NamedTuple):
    """What the work is held against."""

    name: str
    arch: ArchConfig
    ranks: int
    items: WeightItems
    peaks: Peaks


def _model(config: EngineConfig, dtype: torch.dtype) -> _Model:
    if not torch.cuda.is_available():
        raise ConfigError("bench trace measures what a GPU does at its best in this process, which has none")
    arch = ArchConfig.from_source(locate(config.model.reference))
    scheme = wanted_scheme(arch, config.model, dtype)
    peaks = measure_peaks(dtype, scaled=scheme.rounds_rows)
    return _Model(config.model.served_name, arch, config.parallel.tensor, _weight_items(scheme), peaks)


def _weight_items(scheme: Scheme) -> WeightItems:
    linear, expert = (
        form.patch_bytes / (ops.PATCH_ROWS * ops.PATCH_COLUMNS) if form is not None else None
        for form in (scheme.linear_patches, scheme.experts)
    )
    return WeightItems(1 if scheme.scales_rows else linear, expert)


def _trace(engine: Engine, batch: int, work: Work, model: _Model) -> Traced:
    for attempt in range(2):  # First times are not what a trace is about.
        run_work(engine, batch, work, salt=attempt, watch=nullcontext())
    seconds = run_work(engine, batch, work, salt=2, watch=nullcontext()).seconds
    spans: list[Span] = []
    done = run_work(engine, batch, work, salt=3, watch=_recorded(engine, spans))
    steps = done.steps
    result = summarize(spans, model=model.name, batch=batch, steps=steps, seconds=seconds)
    item, cache_item = (getattr(torch, name).itemsize for name in (engine.info.dtype, engine.info.cache_dtype))
    needed = needs(
        model.arch,
        _shape(batch, work, done),
        item=item,
        weight_items=model.items,
        cache_item=cache_item,
        ranks=model.ranks,
    )
    kinds = kind_results(
        kinds_us(spans, steps),
        needed,
        model.peaks,
        model=model.name,
        batch=batch,
        step_us=result.us_per_step,
        layers=model.arch.num_layers,
    )
    return Traced(replace(result, peaks=model.peaks._asdict()), kinds, spans)


@contextmanager
def _recorded(engine: Engine, spans: list[Span]) -> Iterator[None]:
    """Add to `spans` what the first worker's device does meanwhile. Raises ConfigError where it can't be recorded."""
    if (said := engine.control(StartProfile())[0]) != RECORDING:
        raise ConfigError(f"bench trace has no trace: {said}")
    yield
    said = engine.control(StopProfile())[0]
    if not Path(said).is_file():
        raise ConfigError(f"bench trace has no trace: {said}")
    with gzip.open(said, "rt", encoding="utf-8") as file:
        spans += read_trace(json.load(file))


class Done(NamedTuple):
    """How a batch of work went: `steps` were watched and took `seconds`."""

    steps: int
    seconds: float
    steps_of_prompts: int
    """The steps before, until the last prompt had begun; requests whose prompts were done decoded in them."""


def _shape(batch: int, work: Work, done: Done) -> StepShape:
    """What one of the steps has to do, on average."""
    if work.prefill:
        return prefill_shape(batch / done.steps, work.prompt_len)
    return decode_shape(batch, work.prompt_len + 1 + done.steps_of_prompts / 2 + _WARMUP_STEPS + work.steps / 2)


def run_work(engine: Engine, batch: int, work: Work, *, salt: int, watch: AbstractContextManager[object]) -> Done:
    """Do the work once, the steps in question under `watch`. `salt` makes the prompts differ.

    Raises ConfigError where a request reaches model.max_model_len before these steps are over.
    """
    params = SamplingParams(temperature=0, max_tokens=1 if work.prefill else None, ignore_eos=True)
    token_ids = prompt_token_ids(engine.info.vocab_size, engine.info.eos_token_ids)
    draw = random.Random(salt)
    for index in range(batch):
        engine.add([f"{salt}.{index}"], draw.choices(token_ids, k=work.prompt_len), params)
    steps_of_prompts = 0
    if not work.prefill:
        while engine.stats().waiting:
            engine.step()
            steps_of_prompts += 1
        for _ in range(_WARMUP_STEPS):
            engine.step()
    with watch:
        # Without the profiler, as many steps are in flight when the clock starts as when it stops: no need to wait.
        began, steps = perf_counter(), 0
        while engine.has_work if work.prefill else steps < work.steps:
            engine.step()
            steps += 1
        seconds = perf_counter() - began
    stats = engine.stats()
    left = stats.running + stats.waiting
    engine.abort_all()
    while engine.has_work:
        engine.step()
    if not work.prefill and left < batch:
        raise ConfigError(
            f"{batch - left} of {batch} requests ended before {work.steps} steps: raise model.max_model_len"
        )
    return Done(steps, seconds, steps_of_prompts)


def read_trace(trace: dict[str, list[dict[str, object]]]) -> list[Span]:
    """The GPU's work in a trace in Chrome's format, in the order of time."""
    spans = [
        Span(str(event["name"]), float(str(event["ts"])), float(str(event["dur"])))
        for event in trace["traceEvents"]
        if event.get("cat") in _DEVICE_WORK
    ]
    return sorted(spans, key=lambda span: span.start)


def summarize(spans: Sequence[Span], *, model: str, batch: int, steps: int, seconds: float) -> TraceResult:
    """`seconds` for the steps without the profiler."""
    busy = sum(us for _, us in own_us(spans))
    end = max((span.start + span.length for span in spans), default=0.0)
    whole = end - spans[0].start if spans else 0.0
    by_name: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        by_name[short_name(span.name)] += span.length
    longest = sorted(by_name.items(), key=lambda item: -item[1])
    return TraceResult(
        bench="trace",
        model=model,
        batch=batch,
        us_per_step=1e6 * seconds / steps,
        us_per_step_profiled=whole / steps,
        gpu_idle_share=1 - busy / whole if whole else 1.0,
        kernels_per_step=len(spans) / steps,
        kernels_us={name: us / steps for name, us in longest},
    )


def short_name(name: str) -> str:
    """A kernel's name without its return type, namespaces and arguments."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = name.split("(")[0]
    head, bracket, rest = name.partition("<")
    name = head.rsplit("::", 1)[-1] + bracket + rest
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 3] + "..."


def draw_trace(found: Sequence[Traced], path: Path) -> None:
    """A timeline of one step in the middle for each batch: the kernels that take most have a line of their own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2 * len(found)), layout="constrained")
    for axes, (result, _, spans) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        names = list(result.kernels_us)[:8]
        first = spans[len(spans) // 2].start
        length = result.kernels_per_step / len(spans) * (spans[-1].start - spans[0].start)
        shown = [span for span in spans if first <= span.start < first + length]
        lines: list[list[tuple[float, float]]] = [[] for _ in range(len(names) + 1)]
        for span in shown:
            name = short_name(span.name)
            lines[names.index(name) if name in names else -1].append((span.start - first, span.length))
        for line, bars in enumerate(lines):
            axes.broken_barh(bars, (line - 0.4, 0.8))
        axes.set_yticks(range(len(lines)), [*names, "other"], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("µs")
        idle = f"{100 * result.gpu_idle_share:.1f} % idle"
        axes.set_title(f"{result.model}, {result.batch} rows: {result.us_per_step:.0f} µs a step, {idle}", fontsize=9)
    figure.savefig(path, dpi=150)
