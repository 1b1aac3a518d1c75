"""Pacing against a machine whose steps cost what a formula says."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.config.engine import SchedulerConfig
from raylm.core.pacing import PlanDelay, PrefillPacer, StepCost, StepTimer

Cost = Callable[[int, int], float]
FULL = 2048
TARGET_MS = 30.0
TARGET = TARGET_MS / 1000


def gpu(prefill: int, decodes: int) -> float:
    """About an 8B model on a large GPU, in seconds."""
    return 0.005 + 24e-6 * prefill + 36e-6 * decodes


def make_pacer(target_itl_ms: float | None = TARGET_MS, **settings) -> PrefillPacer:
    return PrefillPacer(SchedulerConfig(max_num_batched_tokens=FULL, target_itl_ms=target_itl_ms, **settings))


def tokens_of(pacer: PrefillPacer, num_decodes: int, num_waiting: int = 1) -> int:
    return pacer.budget(num_decodes=num_decodes, num_prompts=0, num_waiting=num_waiting).tokens


def run(pacer: PrefillPacer, cost: Cost, *, decodes: int, steps: int, demand: int = FULL) -> list[tuple[int, float]]:
    """Steps with prompts waiting all the time; (prefill tokens, seconds) of each."""
    history = []
    for _ in range(steps):
        prefill = min(demand, tokens_of(pacer, decodes), FULL - decodes)
        seconds = cost(prefill, decodes)
        pacer.observe(prefill + decodes, seconds)
        history.append((prefill, seconds))
    return history


def ideal(cost: Cost, decodes: int) -> int:
    """The most prefill tokens that keep a step within the target."""
    return max((tokens for tokens in range(FULL - decodes + 1) if cost(tokens, decodes) <= TARGET), default=0)


# The budget.


@pytest.mark.parametrize(("waiting", "tokens"), [(0, 100), (4, 100), (5, 125), (8, 200), (1000, FULL)])
def test_without_a_target_prefill_takes_a_chunk_or_a_quarter_of_one_for_each_that_waits(waiting, tokens):
    pacer = make_pacer(None, prefill_chunk=100)
    run(pacer, gpu, decodes=50, steps=10)
    assert tokens_of(pacer, 50, waiting) == tokens


@pytest.mark.parametrize("target", [TARGET_MS, None])
def test_without_decodes_prefill_takes_the_whole_budget(target):
    pacer = make_pacer(target)
    run(pacer, gpu, decodes=50, steps=10)
    assert tokens_of(pacer, 0) == FULL


def test_before_anything_is_measured_prefill_is_careful():
    assert tokens_of(make_pacer(), 1) == 16


@given(
    fixed=st.floats(0.001, 0.02),
    prefill_us=st.floats(5, 500),
    decode_ratio=st.floats(0.2, 4),
    decodes=st.integers(1, 60),
    starts_with_a_prompt=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_itl_comes_under_the_target_and_near_it(fixed, prefill_us, decode_ratio, decodes, starts_with_a_prompt):
    """Any machine with a linear cost: after 50 steps every step is in time, and at least 4/5 of what could be is used
    (of the time, as far as the least and the full budget allow)."""

    def cost(prefill: int, num_decodes: int) -> float:
        return fixed + prefill_us * 1e-6 * (prefill + decode_ratio * num_decodes)

    pacer = make_pacer()
    if starts_with_a_prompt:
        run(pacer, cost, decodes=0, steps=2)
    run(pacer, cost, decodes=decodes, steps=50)
    best = ideal(cost, decodes)
    for prefill, seconds in run(pacer, cost, decodes=decodes, steps=20):
        assert seconds <= TARGET or prefill == 16
        assert seconds >= 0.8 * TARGET or prefill >= min(best, FULL - decodes) or prefill == 16


def test_it_passes_the_target_only_a_few_times_on_the_way():
    history = run(make_pacer(), gpu, decodes=64, steps=50)
    assert sum(seconds > TARGET for _, seconds in history) <= 2
    assert history[20][0] > 0.8 * ideal(gpu, 64)


def test_a_cost_that_bends_is_followed():
    """Attention makes long steps dearer than a line says."""

    def bent(prefill: int, decodes: int) -> float:
        return gpu(prefill, decodes) + 3e-8 * prefill**2

    pacer = make_pacer()
    run(pacer, bent, decodes=0, steps=2)
    run(pacer, bent, decodes=30, steps=48)
    for prefill, seconds in run(pacer, bent, decodes=30, steps=20):
        assert seconds <= TARGET
        assert prefill > 0.75 * ideal(bent, 30)


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_break_it(seed):
    """A twentieth of noise, and a hiccup of ten times a step now and then."""
    rng = random.Random(seed)

    def noisy(prefill: int, decodes: int) -> float:
        factor = 10 if rng.random() < 0.02 else 1
        return factor * gpu(prefill, decodes) * rng.gauss(1, 0.05)

    pacer = make_pacer()
    run(pacer, noisy, decodes=64, steps=50)
    history = run(pacer, noisy, decodes=64, steps=400)
    late = sum(gpu(prefill, 64) > TARGET for prefill, _ in history)
    mean = sum(prefill for prefill, _ in history) / len(history)
    assert late < 0.1 * len(history)
    assert mean > 0.6 * ideal(gpu, 64)


def test_it_follows_the_load_up_and_down():
    pacer = make_pacer()
    for decodes in (8, 250, 8, 250):
        run(pacer, gpu, decodes=decodes, steps=30)
        for prefill, seconds in run(pacer, gpu, decodes=decodes, steps=10):
            assert seconds <= TARGET
            assert prefill > 0.75 * ideal(gpu, decodes)


def test_it_recovers_when_another_load_on_the_machine_goes():
    pacer = make_pacer()
    slow = run(pacer, lambda prefill, decodes: 4 * gpu(prefill, decodes), decodes=16, steps=50)
    assert slow[-1][1] <= TARGET
    fast = run(pacer, gpu, decodes=16, steps=50)
    assert fast[-1][0] > 0.8 * ideal(gpu, 16)


def test_a_prompt_goes_on_when_decodes_alone_are_too_slow():
    history = run(make_pacer(), lambda prefill, decodes: 0.1 + gpu(prefill, decodes), decodes=64, steps=50)
    assert {prefill for prefill, _ in history[10:]} == {16}


def test_a_budget_under_the_minimum_is_the_minimum():
    pacer = PrefillPacer(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, target_itl_ms=1))
    pacer.observe(8, 1.0)
    assert tokens_of(pacer, 2) == 8


def test_decodes_alone_do_not_make_the_next_prompt_a_leap():
    """Nothing but decodes for long: the first prompt after it starts small and is there within some steps."""
    pacer = make_pacer()
    run(pacer, gpu, decodes=32, steps=200, demand=0)
    history = run(pacer, gpu, decodes=32, steps=30)
    assert history[0][0] <= 64
    assert all(seconds <= 1.5 * TARGET for _, seconds in history)
    assert history[-1][0] > 0.8 * ideal(gpu, 32)


# What one prompt may take.


@pytest.mark.parametrize(
    ("share", "decodes", "prompts", "waiting", "limit"),
    [
        pytest.param(1.0, 0, 1, 1, FULL, id="all of a step without decodes"),
        pytest.param(0.25, 0, 1, 1, FULL // 4, id="its share beside one that waits"),
        pytest.param(0.25, 0, 2, 0, FULL // 4, id="its share beside one that runs"),
        pytest.param(0.25, 0, 0, 1, FULL, id="all of it alone"),
        pytest.param(0.001, 0, 1, 1, 16, id="a small share"),
        pytest.param(1.0, 5, 1, 0, 100, id="a chunk beside decodes"),
        pytest.param(1.0, 5, 1, 8, 100, id="a chunk of the two that are there for those who wait"),
        pytest.param(0.25, 5, 1, 0, 100, id="a chunk alone beside decodes"),
        pytest.param(0.25, 5, 1, 1, 25, id="its share of a chunk"),
        pytest.param(0.25, 5, 1, 8, 50, id="its share of two chunks"),
    ],
)
def test_what_one_prompt_takes(share, decodes, prompts, waiting, limit):
    pacer = make_pacer(None, prefill_chunk=100, max_prompt_share=share)
    assert pacer.budget(num_decodes=decodes, num_prompts=prompts, num_waiting=waiting).of_one == limit


def test_with_a_target_one_prompt_may_take_more_than_a_chunk():
    pacer = make_pacer(prefill_chunk=100)
    run(pacer, gpu, decodes=4, steps=50)
    budget = pacer.budget(num_decodes=4, num_prompts=1, num_waiting=0)
    assert budget.of_one == budget.tokens > 500


# The cost of a step.


def test_the_line_is_found():
    cost = StepCost(0.9)
    assert cost.slope is None
    for tokens in (10, 100, 500, 20):
        cost.observe(tokens, 0.01 + 2e-5 * tokens)
    assert cost.slope == pytest.approx(2e-5)
    assert cost.tokens_in(0.02) == pytest.approx(500)


def test_steps_that_are_all_alike_say_nothing_of_the_slope():
    cost = StepCost(0.9)
    for _ in range(50):
        cost.observe(64, 0.01)
    assert cost.slope is None


def test_the_slope_stays_when_steps_become_alike():
    """The line then moves up and down only; noise, fifty times as steep here, must not turn it."""
    cost = StepCost(0.9)
    for tokens in (10, 100, 500, 20):
        cost.observe(tokens, 0.01 + 2e-5 * tokens)
    for i in range(200):
        cost.observe(500 + i % 2, 0.03 + 0.001 * (i % 2))
    assert 0.7e-5 < cost.slope < 6e-5
    assert cost.tokens_in(0.0305) == pytest.approx(500.5, abs=50)


# When the next step is planned.


def test_a_plan_waits_until_shortly_before_steps_like_the_running_one_end():
    delay = PlanDelay()
    for seconds in (0.012, 0.010, 0.011):
        delay.observe(32, seconds)
    for tokens in (31, 32, 33, 34):
        assert delay.until(tokens, 5.0) == pytest.approx(5.0 + 0.9 * 0.010 - 0.002)


def test_a_plan_behind_a_step_like_none_before_is_made_at_once():
    delay = PlanDelay()
    assert delay.until(32, 5.0) < 5.0
    delay.observe(32, 0.010)
    for tokens in (28, 36, 544):
        assert delay.until(tokens, 5.0) < 5.0


def test_one_short_step_is_forgotten_soon():
    delay = PlanDelay()
    delay.observe(32, 0.001)
    for _ in range(8):
        assert delay.until(32, 0.0) < 0.0
        delay.observe(32, 0.010)
    assert delay.until(32, 0.0) == pytest.approx(0.007)


def test_steps_too_short_to_plan_in_are_not_waited_for():
    delay = PlanDelay()
    delay.observe(32, 0.002)
    assert delay.until(32, 5.0) < 5.0


# The timer.


def test_a_step_takes_from_its_submission_to_its_result():
    timer = StepTimer()
    timer.submitted(1.0)
    assert timer.finished(3.5) == 2.5
    timer.submitted(10.0)
    assert timer.finished(11.0) == 1.0


def test_a_step_submitted_early_begins_when_the_one_before_ends():
    timer = StepTimer()
    timer.submitted(0.0)
    timer.submitted(0.1)
    assert timer.finished(2.0) == 2.0
    timer.submitted(2.1)
    assert timer.finished(3.0) == 1.0
    assert timer.finished(3.5) == 0.5
