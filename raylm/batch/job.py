"""A batch from its input to its output: plan, run what is not done yet, merge."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import msgspec
from tqdm import tqdm

from raylm.batch.files import Place
from raylm.batch.shards import Kind, Plan, Shard, plan_shards
from raylm.batch.tables import rows_as_lines
from raylm.batch.work import Identity, Manifest, Report, Totals, WorkFolder, spool
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError, RaylmError

MAX_BLOCKS = 10_000
"""Shards share Ray Data's blocks where there are more of them."""
MAX_RESTARTS = 16
"""Engines that may die in one run."""
_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".txt": "text",
    ".parquet": "rows",
}


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What a batch is asked to do. `input` and `output` are paths or fsspec URLs.

    engines: None is as many as the cluster has room for. shard_size: requests that are checkpointed together.
    max_tokens: for plain prompts that say nothing. overwrite: drop an output, or another batch's work, that is there.
    """

    input: str
    output: str
    config: EngineConfig
    engines: int | None = None
    shard_size: int = 128
    keep_order: bool = True
    max_tokens: int = 128
    overwrite: bool = False
    progress: bool = True


Distribute = Callable[[list[Shard], BatchSettings, WorkFolder], Generator[Report]]
"""Answers shards somewhere, keeps their results in the folder, and reports each. Not called where there are none."""


class Summary(msgspec.Struct):
    """What a batch gave. `seconds`: from the first request that an engine was given to the last result, now, not in
    earlier runs; `tokens`: generated in that time. resumed: lines that were done before."""

    totals: Totals
    resumed: int
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def run_batch(settings: BatchSettings, distribute: Distribute | None = None) -> Summary:
    """Run a batch to its end, or go on with one that was stopped. The output appears when all of it is there.

    Raises ConfigError before anything runs, RaylmError when it cannot go on; it can then be run again.
    """
    output = Place(settings.output).absolute()
    folder = WorkFolder(Place(f"{output.url}.batch"))
    if settings.overwrite:
        folder.clear()
    else:
        _check_output(output, folder)
    plan = _plan(settings, folder)
    try:
        folder.begin(_identity(settings, plan))
    except OSError as error:
        raise ConfigError(f"--output {settings.output!r} cannot be written: {error}") from None
    manifest = folder.manifest()
    if manifest is not None and manifest.totals is not None:
        folder.complete(manifest)  # Its end may have been cut short.
        return Summary(manifest.totals, plan.num_requests, 0, 0.0)
    finished = folder.finished()
    todo = [shard for shard in plan.shards if shard.index not in finished]
    summary = _run(settings, folder, plan, todo, distribute or on_ray_data)
    summary.totals = folder.merge(plan, output)
    folder.complete(Manifest(_identity(settings, plan), summary.totals))
    return summary


def _check_output(output: Place, folder: WorkFolder) -> None:
    manifest = folder.manifest()
    if manifest is not None and manifest.totals is not None:
        if not output.exists():
            folder.clear()  # The output was taken away since: this is a new batch.
    elif manifest is None or not folder.finished():
        folder.clear()  # Nothing was answered: it is no batch's work.
        if output.exists():
            raise ConfigError(f"--output {output.url!r} is there already; name another, or replace it with --overwrite")


def _plan(settings: BatchSettings, folder: WorkFolder) -> Plan:
    files = Place(settings.input).inputs()
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise ConfigError(f"--input {settings.input!r} names files of several kinds: {', '.join(sorted(kinds))}")
    try:
        if kinds == {"rows"}:
            spool(folder, chain.from_iterable(map(rows_as_lines, files)))
            files = [folder.rows]
        return plan_shards(files, kinds.pop(), settings.shard_size)
    except OSError as error:
        raise ConfigError(f"the batch cannot be planned: {error}") from None


def _kind(file: Place) -> Kind:
    for suffix, kind in _SUFFIXES.items():
        if file.url.endswith(suffix):
            return kind
    raise ConfigError(f"{file.url}: an input's name must end with {', '.join(_SUFFIXES)}")


def _identity(settings: BatchSettings, plan: Plan) -> Identity:
    model = settings.config.model.model_dump_json()
    return Identity(plan.digest, settings.shard_size, model, settings.max_tokens)


def _run(settings: BatchSettings, folder: WorkFolder, plan: Plan, todo: list[Shard], distribute: Distribute) -> Summary:
    """Answer the shards, with a bar on stderr."""
    done = plan.num_requests - sum(shard.num_requests for shard in todo)
    summary = Summary(Totals(), done, 0, 0.0)
    if not todo:
        return summary
    # A log gets a line now and then, a terminal a bar that moves.
    interval = 0.1 if sys.stderr.isatty() else 10.0
    bar = tqdm(
        total=plan.num_requests,
        initial=done,
        unit="line",
        desc="batch",
        mininterval=interval,
        disable=not settings.progress,
    )
    with closing(distribute(todo, settings, folder)) as reports, bar:
        first, last = float("inf"), 0.0
        for report in reports:
            first, last = min(first, report.started), max(last, report.ended)
            summary.seconds = last - first
            summary.tokens += report.totals.completion_tokens
            bar.set_postfix_str(f"{summary.tokens_per_s:.0f} tokens/s", refresh=False)
            bar.update(report.num_requests)
    return summary


def on_cluster(address: str | None) -> Distribute:
    """A way to answer shards that joins or starts a cluster once there are any, and leaves it (raylm.batch.cluster)."""

    def distribute(todo: list[Shard], settings: BatchSettings, folder: WorkFolder) -> Generator[Report]:
        from raylm.batch.cluster import connect, disconnect

        connect(address)
        try:
            yield from on_ray_data(todo, settings, folder)
        finally:
            disconnect()

    return distribute


def on_ray_data(todo: list[Shard], settings: BatchSettings, folder: WorkFolder) -> Generator[Report]:
    """Answer the shards on the cluster that this process is connected to."""
    import ray
    from ray.data import DataContext

    from raylm.batch.pool import plan_pool
    from raylm.batch.stage import ShardStage, Stage, run_stage
    from raylm.executor.cluster import cluster_nodes

    context = DataContext.get_current()
    context.enable_progress_bars = False  # Ours counts lines.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # It warns that there are none.
    context.print_on_execution_start = False
    # An engine holds gigabytes and a shard takes minutes, as they should.
    context.issue_detectors_config.detectors = []
    pool = plan_pool(settings.config, settings.engines, cluster_nodes())
    arguments: dict[str, object] = {
        "folder": folder.place.url,
        "max_tokens": settings.max_tokens,
        "keep_order": settings.keep_order,
        "max_lives": pool.engines + MAX_RESTARTS,
    }
    folder.forget_lives()
    items = [{"shard": msgspec.json.encode(shard)} for shard in todo]
    dataset = ray.data.from_items(items, override_num_blocks=min(len(items), MAX_BLOCKS))
    done = run_stage(dataset, Stage(ShardStage, arguments, 1, "numpy"), pool, batch_requests=settings.shard_size)
    try:
        for row in done.iter_rows():
            yield msgspec.json.decode(row["report"], type=Report)
    except ray.exceptions.RayError as error:
        raise RaylmError(f"the batch stopped, and goes on from there when it is run again: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """The last line that says something: Ray's messages begin with the stacks of its workers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
