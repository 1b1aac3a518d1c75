"""LLM over Ray actors of one node: the same tokens as in process, and nothing left of what could not start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylm import LLM, EngineConfig, SamplingParams
from raylm.core.control import StartProfile, StopProfile
from raylm.errors import ConfigError
from tests.support import checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[3 + i, 5, 7, 9 + i] * (2 + i) for i in range(6)]
SMALL = {"device": "cpu", "num_threads": 1, "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.FAMILIES["llama"](tmp_path_factory.mktemp("llama"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return tokens(LLM(str(folder), progress=False, **SMALL))


@pytest.fixture
def groups_before(ray_cluster: None) -> Iterator[None]:
    """Whatever a test starts, its placement group is gone at the end."""
    before = live_groups()
    yield
    # Ray says that one is gone when its head has come to it.
    deadline = time.monotonic() + 60
    while not live_groups() <= before:
        assert time.monotonic() < deadline, "a placement group is left"
        time.sleep(0.05)


def tokens(llm: LLM) -> list[list[int]]:
    completions = llm.generate(PROMPTS, GREEDY, progress=False)
    llm.close()
    return [completion.outputs[0].token_ids for completion in completions]


def live_groups() -> set[str]:
    from ray.util import placement_group_table

    return {key for key, group in placement_group_table().items() if group["state"] != "REMOVED"}


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_workers_of_one_node_give_the_same_tokens(shape, folder, expected, groups_before, tmp_path):
    tensor, pipeline = shape
    config = {
        "model": {"path": str(folder), "max_model_len": 64},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
        "parallel": {"tensor": tensor, "pipeline": pipeline},
        "runtime": {"device": "cpu", "num_threads": 1, "profile_folder": str(tmp_path)},
    }
    llm = LLM(EngineConfig.model_validate(config), progress=False)
    phases = llm.info.phases
    engine = llm._engine
    engine.add(["a"], PROMPTS[0], GREEDY)
    engine.step()
    # Between steps, with plans in flight.
    assert engine.control(StartProfile()) == ["recording", "recording"]
    while engine.has_work:
        engine.step()
    assert engine.control(StopProfile()) == sorted(map(str, tmp_path.iterdir()))
    assert tokens(llm) == expected
    assert {"workers", "import", "weights"} <= set(phases)


def test_what_ranks_cannot_share_is_refused_and_leaves_nothing(folder, groups_before):
    with pytest.raises(ConfigError, match="num_attention_heads is 4, which parallel.tensor 3 cannot divide"):
        LLM(str(folder), tensor=3, progress=False, **SMALL)


def test_what_no_node_can_hold_is_refused_with_what_the_nodes_have(folder, groups_before):
    from raylm import EngineConfig

    config = {
        "model": {"path": str(folder)},
        "runtime": {"device": "cpu"},
        "parallel": {"tensor": 8, "placement_timeout_s": 0},
    }
    with pytest.raises(ConfigError, match=r"need 8 workers .* the cluster's nodes have: 0 GPU, 3 CPU, after parallel"):
        LLM(EngineConfig.model_validate(config), progress=False)


@pytest.mark.nightly
@pytest.mark.usefixtures("demo")
def test_long_prefills_are_no_hang(groups_before):
    """Steps of 2,048 tokens take a CPU several times the limit; the shorter ones before them tell that they may."""
    config = {
        "model": {"path": "smollm2-135m", "max_model_len": 8192},
        "cache": {"num_blocks": 1200},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 2048},
        "runtime": {"device": "cpu", "num_threads": 1, "ray_workers": True, "step_timeout_s": 2},
    }
    llm = LLM(EngineConfig.model_validate(config), progress=False)
    short, long = [7] * 150, [[5 + i] * 4000 for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.generate([short], params, progress=False)
    completions = llm.generate(long, params, progress=False)
    llm.close()
    assert [len(completion.outputs[0].token_ids) for completion in completions] == [3] * 4
