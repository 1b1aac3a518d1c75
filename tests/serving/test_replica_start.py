"""A replica whose engine starts: as long as it takes, unless its process hangs, and what is said where it fails."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raylm.config.sampling import SamplingDefaults
from raylm.errors import ConfigError, EngineDeadError
from raylm.serving import replica as module
from raylm.serving.directory import Directory, ModelEntry
from raylm.serving.replica import ModelReplica


class Method:
    """An actor's method."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Starting:
    """The reference to what an engine's start returns."""

    def __init__(self) -> None:
        self.ends: Future[str] = Future()

    def future(self) -> Future[str]:
        return self.ends


class Engine:
    """Answers until it hangs."""

    def __init__(self) -> None:
        self.asked = 0
        self.hangs = asyncio.Event()
        self.answer = Method(self._answer)

    async def _answer(self) -> None:
        self.asked += 1
        if self.hangs.is_set():
            await asyncio.Event().wait()


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> ModelReplica:
    monkeypatch.setattr(module, "REPORT_EVERY_S", 0.001)
    made = object.__new__(type("Bare", (ModelReplica,), {"__del__": lambda self: None}))
    made._engine = Engine()
    return made


async def test_a_start_takes_what_it_takes(replica: ModelReplica) -> None:
    starting = Starting()
    started = asyncio.create_task(replica._started(starting))
    while replica._engine.asked < 100:
        await asyncio.sleep(0.001)
    assert not started.done()
    starting.ends.set_result("there")
    assert await started == "there"


async def test_a_start_whose_process_hangs_has_failed(replica: ModelReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STALE_AFTER_S", 0.05)
    started = asyncio.create_task(replica._started(Starting()))
    while not replica._engine.asked:
        await asyncio.sleep(0.001)
    replica._engine.hangs.set()
    with pytest.raises(EngineDeadError, match=r"the engine hangs: its process has not answered for 0\.05 s"):
        await started


async def test_a_start_raises_what_the_engine_does(replica: ModelReplica) -> None:
    starting = Starting()
    starting.ends.set_exception(ConfigError("model.path is gone"))
    with pytest.raises(ConfigError, match=r"model\.path is gone"):
        await replica._started(starting)


async def test_a_replica_whose_engine_does_not_start_says_why(replica: ModelReplica) -> None:
    directory = Directory()

    async def ask(call: Any) -> Any:
        handle = SimpleNamespace(know=Method(directory.know))
        return await call(handle)

    replica._model = ModelEntry("m", "app", "/m", sampling=SamplingDefaults(), since=1.0)
    replica._directory = SimpleNamespace(ask=ask)
    raised = "ray::EngineActor.start()\n  File ...\nraylm.errors.ConfigError: model.path is gone"
    await replica._tell_failure(RuntimeError(raised))
    (known,) = (await directory.watch(-1)).models
    assert known.failure is not None and known.failure.reason == "model.path is gone"
