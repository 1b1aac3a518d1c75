"""A profile of steps on a GPU: the trace has the device's kernels, and graphs replay while it is recorded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from raylm import EngineConfig, SamplingParams
from raylm.core.control import StartProfile, StopProfile
from raylm.engine.factory import local_engine
from tests.support import checkpoints

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_trace_has_the_kernels_of_its_steps(cuda_graphs: bool, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    config = {
        "model": {"path": str(checkpoints.llama(tmp_path)), "max_model_len": 128, "dtype": "bfloat16"},
        "cache": {"block_size": 16, "num_blocks": 64},
        "runtime": {"device": "cuda", "cuda_graphs": cuda_graphs, "profile_folder": str(folder)},
    }
    engine = local_engine(EngineConfig.model_validate(config), progress=False)

    def tokens(name: str, *, profiled: bool) -> list[int]:
        engine.add([name], [5, 6, 7], PARAMS)
        found: list[int] = []
        for _ in range(10):
            found += [token for delta in engine.step() for token in delta.token_ids]
        if profiled:
            assert engine.control(StartProfile()) == ["recording"]
        for _ in range(5):
            found += [token for delta in engine.step() for token in delta.token_ids]
        if profiled:
            assert engine.control(StopProfile()) == [str(path) for path in folder.iterdir()]
        while engine.has_work:
            found += [token for delta in engine.step() for token in delta.token_ids]
        return found

    assert tokens("plain", profiled=False) == tokens("profiled", profiled=True)
    engine.shutdown()
    (path,) = folder.iterdir()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in events) > 10
