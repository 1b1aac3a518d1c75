"""Stages of Ray Data: an actor with an engine, and batches in flight side by side so that the engine stays full."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, NoReturn

import msgspec
import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from raylm import garbage, log
from raylm.batch.answer import Answerer
from raylm.batch.files import Place
from raylm.batch.pool import Pool, open_engine
from raylm.batch.requests import BadLine, BatchRequest, Result, parse_row
from raylm.batch.running import answer_all, run_shard
from raylm.batch.shards import Shard
from raylm.batch.work import Report, WorkFolder
from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError, EngineDeadError

logger = log.get_logger(__name__)

ANSWER_COLUMNS = ("answer", "response", "error")


class Stage(NamedTuple):
    """A stage of a pipeline: the class of its actors and what that is made with; `size` rows make a batch."""

    actor: type
    arguments: dict[str, object]
    size: int
    batch_format: str


def run_stage(dataset: Dataset, stage: Stage, pool: Pool, *, batch_requests: int) -> Dataset:
    """Put the stage behind a dataset, with as many batches of `batch_requests` at each engine as keep it full.

    Ray Data spreads the actors over the nodes, replaces one that dies and runs its batches again.
    """
    in_flight = pool.full_batches(batch_requests)
    return dataset.map_batches(
        stage.actor,
        batch_size=stage.size,
        batch_format=stage.batch_format,
        fn_constructor_kwargs={"config": pool.config, **stage.arguments},
        compute=ActorPoolStrategy(
            size=pool.engines,
            max_concurrent_calls_per_actor=in_flight,
            max_tasks_in_flight_per_actor=in_flight + 1,
        ),
        num_cpus=pool.resources["CPU"],
        num_gpus=pool.resources.get("GPU"),
    )


class ShardStage:
    """Answers shards and keeps their results; what comes out is a report of each."""

    def __init__(self, *, config: EngineConfig, folder: str, max_tokens: int, keep_order: bool, max_lives: int) -> None:
        """Raises RaylmError when the engines of this run have died so often that something must be wrong."""
        log.configure(form=config.runtime.log_format)
        self._folder = WorkFolder(Place(folder))
        self._folder.note_life(max_lives)
        self._keep_order = keep_order
        self._answerer = Answerer(config, open_engine(config), max_tokens=max_tokens)
        garbage.set_apart()

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        shards = [msgspec.json.decode(data, type=Shard) for data in batch["shard"]]
        try:
            reports = [await self._run(shard) for shard in shards]
        except EngineDeadError as error:
            _exit(error)
        return {"report": [msgspec.json.encode(report) for report in reports]}

    async def _run(self, shard: Shard) -> Report:
        return await run_shard(self._answerer, self._folder, shard, keep_order=self._keep_order)


class RowStage:
    """Answers the rows of a table and adds the columns answer, response and error."""

    def __init__(self, *, config: EngineConfig, max_tokens: int) -> None:
        log.configure(form=config.runtime.log_format)
        self._answerer = Answerer(config, open_engine(config), max_tokens=max_tokens)
        garbage.set_apart()

    async def __call__(self, table: pa.Table) -> pa.Table:
        if taken := [name for name in ANSWER_COLUMNS if name in table.column_names]:
            raise ConfigError(f"the rows have a column {taken[0]!r} already; rename it, or drop it")
        requests = [self._request(row, number) for number, row in enumerate(table.to_pylist(), 1)]
        try:
            results = await answer_all(self._answerer, requests, keep_order=True)
        except EngineDeadError as error:
            _exit(error)
        for name, values in zip(ANSWER_COLUMNS, zip(*map(_columns, results), strict=True), strict=True):
            table = table.append_column(name, pa.array(values, pa.string()))
        return table

    def _request(self, row: dict[str, object], number: int) -> BatchRequest | BadLine:
        # In a pipeline a row is its own name.
        row = {"custom_id": "row", **row} if "body" in row else row
        try:
            return parse_row(row, number, model=self._answerer.name)
        except BadLine as error:
            return error


def _exit(error: EngineDeadError) -> NoReturn:
    """Ray starts this actor again and gives it the same batches. An exception would fail the dataset instead."""
    logger.error("this engine's process ends, to be replaced: %s", error)
    os._exit(1)


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None


class _Error(msgspec.Struct):
    message: str


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


def _columns(result: Result) -> tuple[str | None, str | None, str | None]:
    """The first choice's text, the body of the response, and the error's message."""
    if result.response is None:
        return None, None, result.error.message if result.error else None
    raw = bytes(result.response.body)
    body = msgspec.json.decode(raw, type=_Body)
    if body.error is not None or not body.choices:
        return None, raw.decode(), body.error.message if body.error else None
    choice = body.choices[0]
    return choice.message.content if choice.message else choice.text, raw.decode(), None
