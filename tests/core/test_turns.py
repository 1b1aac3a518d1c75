"""Whose turn a step is: prompts that have it alone, decodes that want a block, and who gives way in the middle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raylm.core.sampling import SamplingParams
from tests.support.engines import make_engine, run_to_end
from tests.support.fakes import FakeExecutor, expected_tokens


@pytest.mark.parametrize(
    ("blocks", "settings", "tokens"),
    [
        # At the end what is left of the prompts is less than a step.
        pytest.param(1000, {}, [0, 0, 1], id="they fill steps"),
        pytest.param(1000, {"budget": 300}, [1, 1, 1], id="they fill no step"),
        pytest.param(210, {}, [1, 1, 1], id="not all of them find blocks"),
        pytest.param(1000, {"max_num_seqs": 4}, [1, 1, 1], id="not all of them find rows"),
        pytest.param(1000, {"prefill_chunk": 200}, [1, 1, 1], id="a chunk protects decodes"),
        pytest.param(1000, {"target_itl_ms": 1000.0}, [1, 1, 1], id="a target protects decodes"),
        pytest.param(1000, {"num_stages": 2, "window": 2}, [1, 0, 0, 1], id="on two stages, a step behind"),
    ],
)
def test_prompts_that_fill_steps_come_before_decodes_that_nothing_protects(blocks, settings, tokens):
    executor = FakeExecutor(num_blocks=blocks, block_size=1, max_model_len=200)
    engine = make_engine(executor, **{"budget": 100, "max_num_seqs": 8, **settings})
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add(["runs"], [1, 2], params)
    engine.step()
    for index in range(4):
        engine.add([str(index)], [index + 3] * 65, params)
    steps = [engine.step() for _ in tokens]
    assert [sum(delta.request_id == "runs" for delta in deltas) for deltas in steps] == tokens
    assert list(run_to_end(engine).reasons.values()) == ["length"] * 5


@pytest.mark.parametrize("why", ["samples find no rows", "one waits for its grammar", "groups need more blocks"])
def test_prompts_leave_decodes_their_place_where_some_that_wait_cannot_begin(why):
    windows = (0, 50, 60) if why == "groups need more blocks" else (0,)
    executor = FakeExecutor(num_blocks=640, block_size=1, max_model_len=200, windows=windows)
    engine = make_engine(executor, budget=100, max_num_seqs=8)
    scheduler, params = engine._scheduler, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add(["runs"], [1, 2], params)
    engine.step()
    samples = 4 if why == "samples find no rows" else 1
    for index in range(4):
        names = [f"{index}.{number}" for number in range(samples)]
        engine.add(names, [index + 3] * 65, params if samples == 1 else replace(params, n=samples))
    if why == "one waits for its grammar":
        last = scheduler._requests["3.0"]
        scheduler._policy.remove(last)
        scheduler._hold(last)
    assert "runs" in [delta.request_id for delta in engine.step()]


@pytest.mark.parametrize("max_len", [17, 33])
def test_no_token_is_computed_for_nobody_where_the_last_block_is_full(max_len):
    executor = FakeExecutor(num_blocks=100, block_size=16, max_model_len=max_len)
    engine = make_engine(executor, window=2)
    for index in range(3):
        engine.add([str(index)], [index + 1] * 3, SamplingParams(temperature=0, ignore_eos=True))
    run_to_end(engine)
    assert executor.num_computed == 3 * (max_len - 1)


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("window", [2, 3])
def test_stages_survive_requests_that_give_way_in_the_middle_of_a_turn(window, num_host_blocks):
    executor = FakeExecutor(num_blocks=14, block_size=2, max_model_len=16, num_host_blocks=num_host_blocks)
    engine = make_engine(executor, window=window, num_stages=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for index in range(8):
        engine.add([str(index)], [index + 1] * (1 + index % 4), params)
    collected = run_to_end(engine)
    assert engine.stats().num_preemptions > 0
    for index in range(8):
        prompt = [index + 1] * (1 + index % 4)
        assert collected.tokens[str(index)] == expected_tokens(prompt, params, 16)[0]
