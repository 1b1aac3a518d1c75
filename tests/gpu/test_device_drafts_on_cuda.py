"""Models that draft beside the target on a GPU: through CUDA graphs and eagerly, tokens as without drafts, and nothing
that waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.core.drafting import Drafter
from raylm.core.sampling import SamplingParams
from raylm.engine.engine import Engine
from raylm.engine.factory import local_engine
from tests.support import checkpoints
from tests.support.drafting import METHODS, Fixed, Models
from tests.support.engines import audit, run_to_end
from tests.support.greedy import assert_greedy, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PAYING = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.make(tmp_path_factory.mktemp("models"))


def engine_of(
    target: Path, speculation: dict[str, object], drafter: Drafter, *, dtype: str = "float32", graphs: bool = True
) -> Engine:
    settings = {
        "model": {"path": str(target), "max_model_len": 80, "dtype": dtype},
        "cache": {"num_blocks": 24, "block_size": 16, "swap_gib": 0.05},
        "scheduler": {"max_num_seqs": 48, "max_num_batched_tokens": 48},
        "runtime": {"device": "cuda", "cuda_graphs": graphs},
        "speculation": speculation,
    }
    return local_engine(parse(EngineConfig, settings, source="test"), progress=False, drafter=drafter)


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams, name: str) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add([f"{name} {index}"], prompt, params)
    found = run_to_end(engine).tokens
    audit(engine)
    return [found[f"{name} {index}"] for index in range(len(prompts))]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_transformers(method: str, graphs: bool, dtype: str, models: Models) -> None:
    target, drafter = models.target(method), Fixed(3)
    reference = checkpoints.reference(target)
    if dtype == "bfloat16":
        for parameter in reference.parameters():
            parameter.data = parameter.data.bfloat16().float()
    engine = engine_of(target, models.speculation(method), drafter, dtype=dtype, graphs=graphs)
    prompts = random_prompts(12, checkpoints.VOCAB_SIZE)
    answers(engine, prompts, GREEDY, "warm up")
    answers(engine, prompts, PAYING, "warm up otherwise")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = answers(engine, prompts, GREEDY, "measured")
        # Steps that leave their graph before they sample.
        answers(engine, prompts, PAYING, "otherwise")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == 24
        assert_greedy(reference, prompt, tokens)
    assert drafter.accepted and engine.stats().num_preemptions > 0
    engine.shutdown()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_the_target_itself_drafts_what_is_accepted(graphs: bool, models: Models) -> None:
    speculation = {"method": "draft_model", "model": str(models.llama), "num_drafts": 3}
    drafter = Fixed(3)
    engine = engine_of(models.llama, speculation, drafter, graphs=graphs)
    for turn in range(3):
        answers(engine, random_prompts(4, checkpoints.VOCAB_SIZE), GREEDY, f"turn {turn}")
    drafted, accepted = (sum(counts) for counts in zip(*drafter.accepted, strict=True))
    assert accepted > 0.95 * drafted > 0
    engine.shutdown()


@pytest.mark.parametrize("method", METHODS)
def test_graphs_draft_what_eager_steps_do(method: str, models: Models) -> None:
    accepted = []
    for graphs in (True, False):
        drafter = Fixed(3)
        engine = engine_of(models.target(method), models.speculation(method), drafter, graphs=graphs)
        for turn in range(3):
            answers(engine, random_prompts(4, checkpoints.VOCAB_SIZE), GREEDY, f"turn {turn}")
        accepted.append(sum(count for _, count in drafter.accepted))
        engine.shutdown()
    assert accepted[0] == pytest.approx(accepted[1], rel=0.1)
