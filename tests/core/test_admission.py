"""Refusals by room and by measured rates, and time limits."""

from __future__ import annotations

import math
from collections import Counter
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.config.engine import SchedulerConfig
from raylm.core.admission import Admission
from raylm.core.options import RequestOptions
from raylm.core.request import Request, Status
from raylm.core.sampling import SamplingParams
from raylm.core.step import Sampled
from raylm.errors import Overloaded
from tests.support.engines import make_engine
from tests.support.fakes import FakeExecutor

ROWS = 4


def make_request(
    *,
    prompt: int = 10,
    output: int = 100,
    arrived: float = 0.0,
    deadline_s: float | None = None,
    queue_timeout_s: float | None = None,
    ignore_eos: bool = False,
) -> Request:
    return Request(
        "r",
        [1] * prompt,
        SamplingParams(ignore_eos=ignore_eos),
        seed=0,
        stop_ids=frozenset(),
        max_len=prompt + output,
        options=RequestOptions(deadline_s=deadline_s, queue_timeout_s=queue_timeout_s),
        arrived=arrived,
    )


def make_admission(**settings) -> Admission:
    return Admission(SchedulerConfig(**{"max_num_seqs": ROWS, **settings}))


def check(
    admission: Admission, request: Request, *, running: int = ROWS, waiting: int = 0, tokens: int = 0, now: float = 0.0
) -> None:
    admission.check(request, num_cached=0, num_running=running, num_waiting=waiting, waiting_tokens=tokens, now=now)


def refusal(admission: Admission, request: Request, **load) -> Overloaded:
    with pytest.raises(Overloaded) as error:
        check(admission, request, **load)
    return error.value


def queue_up(admission: Admission, *, steps: int = 100, step_s: float = 0.1, every: int = 5, prompt: int = 100) -> None:
    """A queue that never ends: one request with `prompt` tokens leaves it every so many steps."""
    for step in range(steps):
        if step % every == 1:
            admission.started(make_request(prompt=prompt))
        admission.observe(0, 4, step_s, 3)


def decode(admission: Admission, *, steps: int = 100, step_s: float, finished_after: int | None = None) -> None:
    """Four requests decode and nobody waits; those that end had so many tokens."""
    for step in range(steps):
        admission.observe(0, 4, step_s, 0)
        if finished_after is not None and step % 10 == 0:
            request = make_request()
            request.token_ids += [1] * finished_after
            admission.finished(request)


def prefill(admission: Admission, *, seconds_a_token: float, fixed_s: float = 0.01) -> None:
    """Steps with prompts of several sizes."""
    for tokens in (10, 400, 1000, 50, 2000, 700):
        admission.observe(tokens, 0, fixed_s + tokens * seconds_a_token, 0)


# Room.


def test_a_full_queue_refuses_the_next():
    admission = make_admission(max_queued_requests=3)
    check(admission, make_request(), waiting=2, tokens=20)
    error = refusal(admission, make_request(), waiting=3, tokens=30)
    assert str(error) == "3 requests are waiting, at most 3 may"
    assert error.retry_after == 1.0


def test_queued_tokens_are_limited():
    admission = make_admission(max_queued_tokens=100)
    check(admission, make_request(prompt=40), waiting=1, tokens=60)
    error = refusal(admission, make_request(prompt=41), waiting=1, tokens=60)
    assert str(error) == "60 prompt tokens are waiting; with this request's 41 they pass max_queued_tokens 100"
    assert error.retry_after == 1.0


def test_who_would_wait_too_long_is_refused():
    admission = make_admission(max_queue_s=20)
    check(admission, make_request(), waiting=40)  # Nothing was measured yet.
    queue_up(admission, steps=200, step_s=1.0)
    # A request leaves every 5 s.
    check(admission, make_request(), waiting=3)
    error = refusal(admission, make_request(), waiting=6)
    assert str(error).endswith("s in the queue are predicted, behind 6 requests; max_queue_s allows 20 s")
    assert error.retry_after == pytest.approx(10, rel=0.3)
    assert refusal(admission, make_request(), waiting=6).retry_after > error.retry_after, "one place after the other"
    check(admission, make_request(), running=0)
    check(make_admission(max_queue_s=20, policy="priority"), make_request(), waiting=6)


def test_retry_after_is_when_there_will_be_room():
    admission = make_admission(max_queued_requests=10, max_queued_tokens=2000)
    queue_up(admission, steps=200, step_s=1.0, prompt=100)
    # A request, with 100 prompt tokens, leaves every 5 s.
    assert refusal(admission, make_request(), waiting=10).retry_after == pytest.approx(5, rel=0.1)
    error = refusal(admission, make_request(prompt=200), waiting=5, tokens=2000, now=1000.0)
    assert error.retry_after == pytest.approx(10, rel=0.1)


def test_those_refused_at_once_are_told_one_place_after_the_other_up_to_the_whole_wait():
    admission = make_admission(max_queued_requests=10)
    queue_up(admission, steps=200, step_s=1.0)
    told = [refusal(admission, make_request(), waiting=10, now=7.0).retry_after for _ in range(20)]
    whole = 10 * told[0]
    assert told[:10] == pytest.approx([told[0] * place for place in range(1, 11)])
    assert told[10:] == pytest.approx([whole] * 10), "nobody is told more than the last in the queue waits"
    # Later, as places become free, so do those promised; when all have passed it is as at first.
    assert refusal(admission, make_request(), waiting=10, now=7.0 + whole / 2).retry_after == pytest.approx(
        whole / 2 + told[0]
    )
    assert refusal(admission, make_request(), waiting=10, now=1000.0).retry_after == pytest.approx(told[0])


def test_a_place_that_was_never_measured_is_foretold_by_the_times_of_steps():
    admission = make_admission(max_queued_requests=40)
    decode(admission, step_s=0.2, finished_after=50)
    # 50 tokens of 0.2 s take 10 s, and four requests run at a time.
    told = [refusal(admission, make_request(), waiting=40).retry_after for _ in range(3)]
    assert told == pytest.approx([2.5, 5.0, 7.5], rel=0.01)
    admission = make_admission(max_queued_requests=40)
    decode(admission, step_s=0.2)
    # None has ended: this one may generate 100.
    assert refusal(admission, make_request(), waiting=40).retry_after == pytest.approx(5, rel=0.01)


class _TimedExecutor(FakeExecutor):
    """A step takes 0.1 s of a simulated clock."""

    now = 0.0

    def result(self) -> Sampled:
        self.now += 0.1
        return super().result()


@pytest.mark.parametrize("limit", ["max_queued_requests", "max_queued_tokens"])
def test_one_who_comes_back_when_told_gets_in(limit):
    """A queue of some 10 s, 2 requests/s, and 60 clients at once who come back as often as they are told."""
    executor = _TimedExecutor(num_blocks=200)
    limits = {"queue": 20} if limit == "max_queued_requests" else {"max_queued_tokens": 60}
    engine = make_engine(executor, max_num_seqs=4, clock=lambda: executor.now, **limits)
    arrivals = [(0.0, number) for number in range(24)] + [(5.0, 24 + number) for number in range(60)]
    attempts = Counter[int]()
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= executor.now:
            _, number = heappop(arrivals)
            attempts[number] += 1
            try:
                engine.add([str(number)], [1, 2, number % 60], SamplingParams(max_tokens=20, ignore_eos=True))
            except Overloaded as error:
                heappush(arrivals, (executor.now + math.ceil(error.retry_after), number))
        if engine.has_work:
            engine.step()
        else:
            executor.now += 0.1
    crowd = [attempts[number] for number in range(24, 84)]
    # The queue takes 20 of them a wait: a third gets in at the second attempt at the latest, all after few more.
    assert sum(count <= 2 for count in crowd) >= 20 and sum(crowd) < 3 * len(crowd) and max(crowd) <= 6


# Time in the queue.


def test_a_wait_that_is_too_long_is_refused_with_its_figures():
    admission = make_admission()
    queue_up(admission)
    # Two requests a second leave the queue.
    check(admission, make_request(queue_timeout_s=6), waiting=10, tokens=1000)
    error = refusal(admission, make_request(queue_timeout_s=4), waiting=10, tokens=1000)
    for part in ("queue_timeout_s is 4", " s in the queue are predicted", "behind 10 requests"):
        assert part in str(error)
    error = refusal(admission, make_request(queue_timeout_s=4), waiting=40, tokens=4000)
    assert error.retry_after == pytest.approx(16, abs=1.5)


def test_with_all_rows_taken_the_queue_moves_by_requests():
    admission = make_admission()
    queue_up(admission, prompt=100)
    check(admission, make_request(queue_timeout_s=6), running=ROWS, waiting=10, tokens=50_000)


def test_with_rows_free_the_queue_moves_by_tokens():
    admission = make_admission()
    queue_up(admission, prompt=100)
    # 200 tokens a second leave the queue.
    check(admission, make_request(queue_timeout_s=6), running=1, waiting=100, tokens=1000)
    refusal(admission, make_request(queue_timeout_s=6), running=1, waiting=1, tokens=2000)


def test_time_already_waited_counts():
    admission = make_admission()
    queue_up(admission)
    request = make_request(queue_timeout_s=6, arrived=100.0)
    check(admission, request, waiting=10, now=100.0)
    refusal(admission, request, waiting=10, now=103.0)


def test_an_empty_queue_is_no_wait():
    admission = make_admission()
    queue_up(admission, step_s=10.0)
    check(admission, make_request(queue_timeout_s=0.001), waiting=0)


def test_requests_that_never_waited_say_nothing_of_the_queue():
    """One small request every second in a nearly idle engine is not all that it could do."""
    admission = make_admission()
    for _ in range(100):
        admission.started(make_request(prompt=1))
        admission.observe(1, 4, 1.0, 0)
    check(admission, make_request(queue_timeout_s=5), waiting=1000, tokens=10_000)


def test_requests_that_never_waited_do_not_make_a_queue_look_fast():
    admission = make_admission()
    for _ in range(1000):
        admission.started(make_request())
        admission.observe(10, 4, 0.01, 0)
    queue_up(admission)
    refusal(admission, make_request(queue_timeout_s=5), waiting=20)


def test_with_another_policy_a_newcomer_may_not_have_to_wait():
    for policy in ("priority", "fair"):
        admission = make_admission(policy=policy)
        queue_up(admission)
        check(admission, make_request(queue_timeout_s=1), waiting=100)


def test_old_measurements_give_way_to_new_ones():
    admission = make_admission()
    queue_up(admission, steps=2000, every=50)
    refusal(admission, make_request(queue_timeout_s=20), waiting=20)
    queue_up(admission, steps=2000, every=2)
    check(admission, make_request(queue_timeout_s=20), waiting=20)
    # A queue that was long ago says nothing any more.
    queue_up(admission, steps=2000, every=50)
    decode(admission, steps=10_000, step_s=0.1)
    check(admission, make_request(queue_timeout_s=20), waiting=1000)


# The deadline.


def test_with_nothing_measured_nothing_is_refused():
    request = make_request(prompt=10**4, output=10**6, deadline_s=0.001, queue_timeout_s=0.001, ignore_eos=True)
    check(make_admission(), request, waiting=1000, tokens=10**6)


def test_one_step_is_no_measurement():
    admission = make_admission()
    admission.observe(1000, 4, 0.5, 10)
    check(admission, make_request(deadline_s=0.1, queue_timeout_s=0.1, ignore_eos=True), waiting=100, tokens=10**6)


def test_all_output_tokens_count_when_eos_does_not_end_it():
    admission = make_admission()
    decode(admission, step_s=0.05)
    check(admission, make_request(output=100, deadline_s=5.1, ignore_eos=True))
    error = refusal(admission, make_request(output=100, deadline_s=4.9, ignore_eos=True))
    assert "deadline_s is 4.9, but 5.00 s are predicted" in str(error)
    assert "5.00 s for 100 output tokens" in str(error)
    # Without a queue waiting does not help.
    assert error.retry_after == 1.0


def test_otherwise_the_recent_mean_counts_up_to_the_limit():
    admission = make_admission()
    decode(admission, step_s=0.05, finished_after=40)
    check(admission, make_request(output=1000, deadline_s=2.1))
    refusal(admission, make_request(output=1000, deadline_s=1.9))
    check(admission, make_request(output=10, deadline_s=0.6))
    refusal(admission, make_request(output=10, deadline_s=0.4))


def test_the_prompt_counts_by_its_own_cost():
    admission = make_admission()
    prefill(admission, seconds_a_token=1e-3)
    check(admission, make_request(prompt=5000, deadline_s=5.1))
    refusal(admission, make_request(prompt=5000, deadline_s=4.9))


def test_steps_of_one_size_say_nothing_of_a_long_prompt():
    """Tiny prompts beside decodes cost what a step costs, and not what their share of it would be."""
    admission = make_admission()
    for _ in range(1000):
        admission.observe(2, 1, 0.05, 0)
    check(admission, make_request(prompt=100_000, output=1, deadline_s=1))


def test_the_wait_counts_towards_the_deadline():
    admission = make_admission()
    queue_up(admission)
    # Half a second a request, a tenth a token.
    check(admission, make_request(output=10, deadline_s=6.5, ignore_eos=True), waiting=10)
    error = refusal(admission, make_request(output=10, deadline_s=4, ignore_eos=True), waiting=10)
    assert "behind 10 requests" in str(error)
    assert error.retry_after == pytest.approx(2, abs=0.5)


def test_an_idle_engine_takes_everybody():
    """It was slow when many ran; if it refused for that now, nothing would run and it could never learn better."""
    admission = make_admission()
    decode(admission, step_s=10.0)
    request = make_request(output=100, deadline_s=1, ignore_eos=True)
    refusal(admission, request, running=1)
    check(admission, request, running=0)


# Time limits.


def test_a_deadline_is_due_whatever_the_request_does():
    admission = make_admission()
    requests = [make_request(deadline_s=5) for _ in range(3)]
    requests[1].status = Status.RUNNING
    requests[2].status = Status.FINISHED
    for request in requests:
        admission.watch(request)
    assert admission.due(4.9) == []
    assert admission.due(5.0) == requests[:2]
    assert admission.due(100.0) == []


def test_time_in_the_queue_is_due_only_before_a_request_ran():
    admission = make_admission()
    waits, runs, preempted, ended = requests = [make_request(queue_timeout_s=5) for _ in range(4)]
    runs.status = Status.RUNNING
    waits.is_new = True
    ended.status = Status.FINISHED
    for request in requests:
        admission.watch(request)
    assert admission.due(5.0) == [waits]
    assert admission.due(math.inf) == []


def test_a_request_without_limits_is_never_due():
    admission = make_admission()
    admission.watch(make_request())
    assert admission.due(math.inf) == []


def test_a_request_past_both_limits_is_named_once():
    admission = make_admission()
    request = make_request(queue_timeout_s=1, deadline_s=2)
    admission.watch(request)
    assert admission.due(3.0) == [request]
    assert admission.due(3.0) == []


def test_forks_go_with_the_request_that_they_wait_for():
    admission = make_admission()
    leader, fork, ended = (make_request(queue_timeout_s=5) for _ in range(3))
    leader.forks = [fork, ended]
    leader.is_new = True
    fork.status = Status.PARKED
    ended.status = Status.FINISHED
    for request in (leader, fork, ended):
        admission.watch(request)
    assert admission.due(5.0) == [leader, fork]


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.1, 100), st.none() | st.floats(0.1, 100), st.booleans()), max_size=200
    )
)
@settings(max_examples=50, deadline=None)
def test_due_names_each_request_exactly_when_its_time_is_up(plans):
    """Beside a plain list: arrivals with limits, some of which end early, and the clock going on."""
    admission = make_admission()
    live: list[Request] = []
    for now, (arrived, deadline_s, queue_timeout_s, ends_early) in enumerate(plans):
        request = make_request(arrived=now + arrived, deadline_s=deadline_s, queue_timeout_s=queue_timeout_s)
        request.is_new = True
        admission.watch(request)
        if ends_early:
            request.status = Status.FINISHED
        else:
            live.append(request)
        expected = {request for request in live if min(request.deadline, request.queue_deadline) <= now}
        due = admission.due(float(now))
        assert len(due) == len(set(due))
        assert set(due) == expected
        for request in due:
            request.status = Status.FINISHED
            live.remove(request)


def test_limits_far_away_do_not_keep_requests_that_ended():
    admission = make_admission()
    for _ in range(5000):
        request = make_request(deadline_s=100_000)
        admission.watch(request)
        request.status = Status.FINISHED
    assert len(admission._limits._heap) <= 64
