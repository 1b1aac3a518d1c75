"""Engines over a cluster of several nodes, which is another process's; see several_nodes.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from raylm import LLM, EngineConfig, SamplingParams
from tests.support import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.FAMILIES["llama"](tmp_path_factory.mktemp("llama"), num_hidden_layers=4)


@pytest.mark.nightly
def test_stages_on_nodes_of_their_own_and_engines_side_by_side(folder, tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.executor.several_nodes", str(folder)],
        env={**os.environ, "TMPDIR": str(tmp_path), "RAY_TMPDIR": tempfile.gettempdir()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    expected = tokens_of_one_worker(folder, found["prompts"])

    apart = found["stages apart"]
    assert apart["tokens"] == expected
    engine, *stages = apart["bundles"]
    assert engine == "127.0.0.1" and sorted(stages) == ["127.0.0.2", "127.0.0.3"]
    assert len(apart["plans"]) == 4, "all workers are on other nodes than the engine"
    assert "others use them: after parallel.placement_timeout_s 5 s 0 GPU and 0 CPU were free" in found["taken"]
    assert "the cluster's nodes have: 3 × 0 GPU, 1 CPU" in found["taken"]

    first, second = found["two at once"]
    assert first["tokens"] == second["tokens"] == expected
    plans = [*first["plans"], *second["plans"]]
    assert len(plans) == len(set(plans)) == 3
    assert found["left"] == [], "an engine that was closed holds nothing"
    assert not list(tmp_path.glob("raylm-*"))


def tokens_of_one_worker(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    config = {
        "model": {"path": str(folder), "max_model_len": 64},
        "cache": {"block_size": 4, "num_blocks": 200},
        "runtime": {"device": "cpu", "num_threads": 1},
    }
    llm = LLM(EngineConfig.model_validate(config), progress=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = [completion.outputs[0].token_ids for completion in llm.generate(prompts, params, progress=False)]
    llm.close()
    return tokens
