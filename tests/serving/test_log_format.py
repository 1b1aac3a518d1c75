"""Every process of a model writes its log as runtime.log_format says: no cluster, only what each does at its start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raylm import log
from raylm.batch import stage
from raylm.config.application import ModelDeployment, load_model
from raylm.config.engine import EngineConfig
from raylm.config.resolve import resolve
from raylm.engine import actor
from raylm.executor.ray import WorkerActor
from raylm.serving.replica import ModelReplica


class Begun(Exception):
    """A process has come to what needs a cluster or a model."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[logging.Handler]]:
    logger = logging.getLogger("raylm")
    before, level, propagates = logger.handlers[:], logger.level, logger.propagate
    logger.handlers.clear()
    yield logger.handlers
    logger.handlers[:] = before
    logger.setLevel(level)
    logger.propagate = propagates


def begin_replica(config: ModelDeployment, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("raylm.serving.replica.serve.get_replica_context", _raise)
    with pytest.raises(Begun):
        begun: Any = ModelReplica.__init__(cast("ModelReplica", SimpleNamespace()), config, {"CPU": 1.0}, "node")
        begun.send(None)


def begin_engine(config: ModelDeployment, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(actor, "ray_executor", _raise)
    with pytest.raises(Begun):
        actor.EngineActor().start(config.engine, None, {"CPU": 1.0}, "node")  # type: ignore[arg-type]


def begin_worker(config: ModelDeployment, patch: pytest.MonkeyPatch) -> None:
    WorkerActor(resolve(config.engine, "cpu"))


def begin_shards(config: ModelDeployment, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stage, "WorkFolder", _raise)
    with pytest.raises(Begun):
        stage.ShardStage(config=config.engine, folder="/nowhere", max_tokens=1, keep_order=True, max_lives=1)


def begin_rows(config: ModelDeployment, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stage, "open_engine", _raise)
    with pytest.raises(Begun):
        stage.RowStage(config=config.engine, max_tokens=1)


def _raise(*ignored: object, **too: object) -> None:
    raise Begun


@pytest.mark.parametrize("begin", [begin_replica, begin_engine, begin_worker, begin_shards, begin_rows])
def test_a_process_of_a_model_writes_what_its_engine_says(
    begin: Callable[[ModelDeployment, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    handlers: list[logging.Handler],
) -> None:
    for form in ("text", "json"):
        engine = {"model": {"path": "smollm2-135m"}, "runtime": {"log_format": form, "device": "cpu"}}
        begin(load_model({"engine": engine}, source="test"), monkeypatch)
        (handler,) = handlers
        record = log.get_logger("x").makeRecord("raylm.x", logging.INFO, "f", 1, "one", (), None)
        line = handler.format(record)
        assert json.loads(line)["message"] == "one" if form == "json" else line.endswith("INFO raylm.x: one")


def test_text_is_the_default() -> None:
    assert EngineConfig.model_validate({"model": {"path": "m"}}).runtime.log_format == "text"
