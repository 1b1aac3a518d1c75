"""How long a step may take: the configured limit, or what steps of its kind were seen to need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.executor.patience import Patience


def run(patience: Patience, steps: list[tuple[int, float]], *, now: float = 0.0) -> float:
    """Steps one after another, each of so many tokens and seconds; the time after them."""
    for num_tokens, seconds in steps:
        patience.sent(num_tokens, now)
        now += seconds
        patience.answered(now)
    return now


def limit_of(patience: Patience, num_tokens: int, now: float) -> float:
    patience.sent(num_tokens, now)
    return patience.limit_s


def test_the_configured_limit_holds_where_steps_are_faster() -> None:
    patience = Patience(10.0)
    assert patience.limit_s == 10.0
    now = run(patience, [(256, 0.5), (8, 0.02)] * 10)
    assert limit_of(patience, 256, now) == 10.0


def test_a_chunk_may_take_three_times_what_the_one_before_did() -> None:
    patience = Patience(10.0)
    now = run(patience, [(2048, 9.0)])
    assert limit_of(patience, 2048, now) == pytest.approx(27.0)


def test_a_short_prompt_tells_of_a_long_one() -> None:
    patience = Patience(10.0)
    now = run(patience, [(128, 4.0)])
    assert limit_of(patience, 2048, now) == pytest.approx(3 * 16 * 4.0)


def test_a_decode_step_says_nothing_of_a_prompt_nor_does_a_prompt_lengthen_a_decode_step_for_long() -> None:
    patience = Patience(10.0)
    now = run(patience, [(1, 5.0)])
    assert limit_of(patience, 2048, now) == 10.0
    patience = Patience(10.0)
    now = run(patience, [(2048, 60.0)] + [(8, 0.1)] * 64)
    assert limit_of(patience, 8, now) == 10.0


def test_a_step_begins_when_the_one_before_has_ended() -> None:
    """Two in flight: the second one's wait for the device is not its own time."""
    patience = Patience(1.0)
    patience.sent(64, 0.0)
    patience.sent(64, 0.0)
    patience.answered(8.0)
    patience.answered(16.0)
    assert limit_of(patience, 64, 16.0) == pytest.approx(24.0)


def test_what_workers_do_besides_counts_for_no_step() -> None:
    patience = Patience(1.0)
    patience.sent(64, 0.0)
    patience.resumed(100.0)
    patience.answered(100.2)
    assert limit_of(patience, 64, 101.0) == 1.0


@given(st.lists(st.tuples(st.integers(1, 8192), st.floats(0.001, 100.0)), max_size=30), st.integers(1, 8192))
def test_steps_that_slow_down_threefold_are_never_taken_for_a_hang(
    steps: list[tuple[int, float]], num_tokens: int
) -> None:
    patience = Patience(5.0)
    now = run(patience, steps)
    limit = limit_of(patience, num_tokens, now)
    assert limit >= 5.0
    same = [seconds for seen, seconds in steps if seen == num_tokens]
    assert limit >= 2.99 * max(same, default=0.0)
