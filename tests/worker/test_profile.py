"""A profile of steps: what a worker records, where it puts it, and what it says of it."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from raylm import LLM
from raylm.config.engine import EngineConfig
from raylm.core.control import StartProfile, StopProfile
from raylm.core.sampling import SamplingParams
from raylm.engine.engine import Engine
from raylm.engine.factory import local_engine
from raylm.errors import RequestRejected
from tests.support import checkpoints

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.llama(tmp_path_factory.mktemp("llama"))


def make_engine(model: Path, folder: Path | None) -> Engine:
    runtime = {"device": "cpu", "num_threads": 1, "profile_folder": None if folder is None else str(folder)}
    config = {"model": {"path": str(model), "max_model_len": 64}, "cache": {"num_blocks": 33}, "runtime": runtime}
    return local_engine(EngineConfig.model_validate(config), progress=False)


def events(path: Path) -> list[str]:
    """Names of what was recorded."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_a_trace_has_the_steps_between_start_and_stop(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    engine = make_engine(model, folder)
    engine.add(["a"], [5, 6, 7], PARAMS)
    engine.step()
    assert engine.control(StopProfile()) == ["nothing is recorded"]
    assert engine.control(StartProfile()) == ["recording"]
    assert engine.control(StartProfile()) == ["steps are being recorded already"]
    engine.step()
    (said,) = engine.control(StopProfile())
    assert engine.step(), "requests go on"
    (path,) = folder.iterdir()
    assert str(path) == said and path.name.startswith("worker-0-")
    found = set(events(path))
    assert "raylm::decode_layers" in found or "raylm::paged_attention" in found
    engine.shutdown()


def test_a_profile_ends_by_itself_after_its_steps(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model, tmp_path)
    assert engine.control(StartProfile(num_steps=2)) == ["recording 2 steps"]
    engine.add(["a"], [5, 6, 7], PARAMS)
    for _ in range(6):
        engine.step()
    assert not engine.has_work
    deadline = time.monotonic() + 60
    while not (paths := list(tmp_path.glob("worker-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    (path,) = paths
    assert engine.control(StopProfile()) == [str(path)]
    assert events(path).count("raylm::place") == 2, "of two steps, no more"
    engine.shutdown()


def test_a_folder_that_cannot_be_written_costs_no_step(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = make_engine(model, tmp_path / "file" / "traces")
    engine.control(StartProfile())
    engine.add(["a"], [5], PARAMS)
    engine.step()
    (said,) = engine.control(StopProfile())
    assert said.startswith("the trace could not be written: ")
    assert engine.step()
    engine.shutdown()


def test_a_profiler_that_cannot_start_costs_no_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: object) -> None:
        raise RuntimeError("the counters are in use")

    monkeypatch.setattr("torch.profiler.profile.start", start)
    engine = make_engine(model, tmp_path)
    assert engine.control(StartProfile()) == ["nothing is recorded: the counters are in use"]
    assert engine.control(StopProfile()) == ["nothing is recorded"]
    engine.add(["a"], [5], PARAMS)
    assert engine.step()
    engine.shutdown()


def test_offline_use_has_it_too(model: Path, tmp_path: Path) -> None:
    config = {"model": {"path": str(model), "max_model_len": 64}, "cache": {"num_blocks": 33}}
    runtime = {"device": "cpu", "num_threads": 1, "profile_folder": str(tmp_path)}
    llm = LLM(EngineConfig.model_validate(config | {"runtime": runtime}), progress=False)
    llm.start_profile()
    llm.generate([[5, 6]], PARAMS, progress=False)
    assert llm.stop_profile() == [str(path) for path in tmp_path.iterdir()]
    llm.close()


def test_without_a_folder_it_is_refused(model: Path) -> None:
    engine = make_engine(model, None)
    with pytest.raises(RequestRejected, match=r"runtime\.profile_folder is not set"):
        engine.control(StartProfile())
    engine.shutdown()
