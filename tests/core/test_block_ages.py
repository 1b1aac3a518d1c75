"""Ages of cached blocks, by a clock of their own."""

from __future__ import annotations

import pytest

from raylm.core.block_ages import BlockAges
from raylm.core.histogram import Buckets
from raylm.core.sampling import SamplingParams
from tests.support.engines import make_engine, run_to_end
from tests.support.fakes import FakeExecutor


def seen(buckets: Buckets) -> tuple[int, float]:
    """How many values, and their sum."""
    return sum(buckets.counts), buckets.total


def test_a_block_that_is_found_again_and_then_makes_room():
    now = [0.0]
    engine = make_engine(FakeExecutor(num_blocks=5, block_size=4, max_model_len=16), clock=lambda: now[0])

    def ask(tokens: list[int], at: float) -> None:
        now[0] = at
        engine.add([str(at)], tokens, SamplingParams(max_tokens=1))
        run_to_end(engine)

    ask([1] * 5, 100.0)  # Its first block can be found from here on.
    ask([1] * 5, 103.0)  # It is found, 3 s after its last use.
    ask([2] * 15, 110.0)  # Needs all four blocks.
    blocks = engine.measures().blocks
    assert seen(blocks.reuse_gap) == (1, 3.0)
    assert seen(blocks.lifetime) == (1, 10.0)
    assert seen(blocks.idle_before_evict) == (1, 7.0)


@pytest.mark.parametrize(("num_blocks", "followed"), [(512, 511), (1601, 100)])
def test_of_many_blocks_some_are_followed(num_blocks, followed):
    ages = BlockAges(num_blocks)
    blocks = [block for block in range(1, num_blocks) if not block & ages.mask]
    assert len(blocks) == followed
    for block in blocks:
        ages.now = float(block)
        ages.taken(block)
    ages.now = float(num_blocks)
    for block in blocks:
        ages.evicted(block)
    assert seen(ages.measures.lifetime) == (followed, sum(num_blocks - block for block in blocks)), "each has its own"


def test_an_engine_measures_its_steps():
    engine = make_engine(FakeExecutor(num_blocks=64, block_size=4), budget=8)
    engine.add(["a"], [1] * 15, SamplingParams(max_tokens=3, ignore_eos=True))
    run_to_end(engine)
    measures = engine.measures()
    assert seen(measures.step_tokens) == (4, 15 + 2), "two steps of the prompt, two of one token"
    assert {stage: seen(buckets)[0] for stage, buckets in measures.step_seconds.items()} == {
        **dict.fromkeys(("schedule", "submit", "wait", "update"), 4),
        "send": 0,
        "delay": 0,
    }
