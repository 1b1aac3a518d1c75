"""Drafts through the scheduler, on the fake worker: the same tokens in fewer steps."""

from __future__ import annotations

from random import Random

import pytest

from raylm.config.speculation import SpeculationConfig
from raylm.core.drafting import Proposal
from raylm.core.sampling import SamplingParams
from raylm.core.speculation import ReplayProposer, RequestDrafter, Speculation, make_drafter
from tests.support.drafters import RandomDrafter
from tests.support.engines import make_engine, run_to_end
from tests.support.fakes import FakeExecutor, expected_tokens

PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4 + i] for i in range(6)]


class Clock:
    """A millisecond from one look to the next: all steps take equally long."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 0.001
        return self.time


def run(drafter, *, window: int = 1, num_blocks: int = 1000, max_num_seqs: int = 8, prompts=PROMPTS):
    executor = FakeExecutor(num_blocks=num_blocks, max_model_len=300)
    engine = make_engine(executor, window=window, drafter=drafter, clock=Clock(), budget=100, max_num_seqs=max_num_seqs)
    for index, prompt in enumerate(prompts):
        engine.add([str(index)], prompt, PARAMS)
    found = run_to_end(engine)
    for index, prompt in enumerate(prompts):
        assert found.tokens[str(index)] == expected_tokens(prompt, PARAMS, 300)[0]
    return executor.num_steps, engine


def replay(probability: float, num_drafts: int = 4) -> RequestDrafter:
    outputs = {tuple(prompt): expected_tokens(prompt, PARAMS, 300)[0] for prompt in PROMPTS}
    return RequestDrafter(Speculation(ReplayProposer(outputs, probability), num_drafts))


@pytest.mark.parametrize("window", [1, 2, 3])
def test_right_drafts_save_steps(window):
    steps, engine = run(replay(1.0), window=window)
    assert steps < 200 / 3
    drafts = engine.stats().drafts
    assert drafts.num_accepted_tokens == sum(drafts.accepted_by_position) > 6 * 120
    # With plans in flight the last drafts of a request may be behind its end.
    assert drafts.num_accepted_tokens >= 0.9 * drafts.num_draft_tokens


def test_wrong_drafts_cost_few_steps_more():
    steps, engine = run(replay(0.0))
    assert steps <= 202
    assert engine.stats().drafts.num_accepted_tokens == 0


@pytest.mark.parametrize("window", [1, 2])
def test_a_request_that_was_preempted_is_drafted_for_again(window):
    drafter = RandomDrafter(Random(5))
    _, engine = run(drafter, window=window, num_blocks=90)
    assert engine.stats().num_preemptions > 3
    assert drafter.num_verified > 300 and drafter.num_accepted > 100


def test_drafts_leave_a_token_of_the_budget_to_every_running_request():
    executor = FakeExecutor(num_blocks=1000, max_model_len=300)
    engine = make_engine(executor, drafter=RandomDrafter(Random(1)), clock=Clock(), budget=8, max_num_seqs=6)
    for index, prompt in enumerate(PROMPTS):
        engine.add([str(index)], prompt, PARAMS)
    run_to_end(engine)
    assert executor.num_steps <= 6 + 200


class Greedy(RandomDrafter):
    """Always as many drafts as it may."""

    def is_on(self, num_rows):
        return True

    def plan(self, requests):
        return {request: Proposal(self._most, [1] * self._most) for request in requests}


@pytest.mark.parametrize("target_itl_ms", [None, 1.0])
def test_drafts_do_not_keep_prompts_waiting(target_itl_ms):
    executor = FakeExecutor(num_blocks=1000, max_model_len=300)
    drafter = Greedy(Random(1), most=9)
    engine = make_engine(
        executor, drafter=drafter, clock=Clock(), budget=60, max_num_seqs=7, target_itl_ms=target_itl_ms
    )
    for index, prompt in enumerate(PROMPTS):
        engine.add([str(index)], prompt, PARAMS)
    for _ in range(10):
        engine.step()
    assert drafter.num_verified > 6 * 9, "drafts take all of a step"
    engine.add(["long"], [5] * 100, PARAMS)
    steps = 0
    while not any(delta.request_id == "long" for delta in engine.step()):
        steps += 1
    # A hundred tokens of the prompt, 60 a step, or 16 beside decodes where steps are slower than the target.
    assert steps <= (4 if target_itl_ms is None else 9)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_configured_method_drafts(method):
    drafter = make_drafter(SpeculationConfig(method=method, num_drafts=3, min_n=1))
    assert drafter is not None
    run(drafter, prompts=[[5, 6, 7, 8] * 10, [1, 2] * 20])
    assert drafter.counters.num_draft_tokens > 0
    assert len(drafter.counters.accepted_by_position) == 3


def test_no_method_no_drafter():
    assert make_drafter(SpeculationConfig()) is None
