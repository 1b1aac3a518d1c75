"""Requests that wait outside of an engine's queue, and what the engine makes of them."""

from __future__ import annotations

import pytest

from raylm.core.sampling import SamplingParams
from raylm.engine.feeder import Feeder, Group
from tests.support.engines import make_engine
from tests.support.fakes import FakeExecutor

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        pytest.param(4, [0, 0, 1], id="all find rows"),
        # Seven are enough for the engine's queue, and find rows; others are to come.
        pytest.param(9, [1, 1, 1], id="some will wait for rows"),
    ],
)
def test_prompts_have_steps_to_themselves_only_where_all_that_are_to_come_find_rows(prompts, tokens):
    engine = make_engine(FakeExecutor(num_blocks=1000, max_model_len=200), budget=100, max_num_seqs=8)
    feeder = Feeder(engine)
    engine.add(["runs"], [1, 2], PARAMS)
    engine.step()
    for index in range(prompts):
        feeder.put(Group([str(index)], [index + 3] * 65, PARAMS))
    assert [sum(delta.request_id == "runs" for delta in _fed_step(engine, feeder)) for _ in tokens] == tokens


def test_dropped_groups_are_expected_no_longer():
    engine = make_engine(FakeExecutor(num_blocks=1000, max_model_len=200), budget=100, max_num_seqs=8)
    feeder = Feeder(engine)
    engine.add(["runs"], [1, 2], PARAMS)
    engine.step()
    for index in range(9):
        feeder.put(Group([f"{index}.0", f"{index}.1"], [index + 3] * 65, PARAMS))
    for index in range(3, 9):
        feeder.drop(f"{index}.1")
    assert all(delta.request_id != "runs" for delta in _fed_step(engine, feeder))
    assert feeder.is_empty


def _fed_step(engine, feeder):
    for group in feeder.ready():
        engine.add(*group)
    return engine.step()
