from __future__ import annotations

import pytest

from raylm.config.engine import SchedulerConfig
from raylm.config.resolve import ResolvedScheduler
from raylm.core.sampling import SamplingParams
from raylm.core.step import NewRow, RowSampling, StepPlan
from raylm.errors import ConfigError
from raylm.sim.cost import PRESETS, DeviceCost
from raylm.sim.executor import SimulatedExecutor
from raylm.sim.report import summarize
from raylm.sim.simulator import Setup, Simulation
from raylm.sim.traces import Arrival, make_trace

# A millisecond a prefill token, 10 ms a step: times can be worked out by hand.
PLAIN = DeviceCost(fixed=0.010, prefill=0.001, decode=0.0, context=0.0)
GREEDY = RowSampling(SamplingParams(temperature=0.0))


def arrival(at, prompt_len, output_len, *, tenant="all", priority=0, shared=0):
    return Arrival(at, prompt_len, output_len, shared, tenant, priority)


def simulate(arrivals, *, cost=PLAIN, num_blocks=1000, deadline_s=None, **scheduler):
    config = ResolvedScheduler(**{"max_num_seqs": 8, "max_num_batched_tokens": 512, **scheduler})
    return Simulation(arrivals, Setup(config, cost, num_blocks, deadline_s=deadline_s)).run()


def results(outcome, **config):
    summary = summarize(outcome, trace="t", config=SchedulerConfig(**config), rate=1.0)
    return {result.tenant: result for result in summary}


def test_one_request_takes_the_time_of_its_steps():
    outcome = simulate([arrival(1.0, 50, 4)])
    (served,) = outcome.served
    assert served.times == pytest.approx([1.06, 1.07, 1.08, 1.09])
    assert served.ttft == pytest.approx(0.06)
    assert served.gaps == pytest.approx([0.01] * 3)
    assert served.end == "length"
    assert outcome.seconds == pytest.approx(1.09)


def test_a_prompt_in_chunks_takes_a_step_each():
    (served,) = simulate([arrival(0.0, 50, 2)], max_num_batched_tokens=20).served
    # 20, 20 and 10 tokens.
    assert served.times == pytest.approx([0.08, 0.09])


def test_two_plans_are_in_flight():
    # The second comes while the first plan runs and the next one is made: it is part of the one after that.
    first, second = simulate([arrival(0.0, 50, 8), arrival(0.01, 30, 1)]).served
    assert first.times[:3] == pytest.approx([0.06, 0.07, 0.11])
    assert second.times == pytest.approx([0.11])


def test_a_plan_waits_for_those_who_come_while_steps_like_the_running_one_run():
    """Steps of 10 ms run from 0.11 to 0.12 and so on; plans are made 3 ms before a step ends."""
    for at, first in [(0.1165, 0.16), (0.1175, 0.17)]:
        decoding, late = simulate([arrival(0.0, 50, 40), arrival(at, 30, 1)]).served
        assert decoding.times[:7] == pytest.approx([0.06, 0.07, 0.08, 0.09, 0.10, 0.11, 0.12])
        assert late.times == pytest.approx([first])


def test_every_request_gets_its_tokens_and_the_clock_only_goes_on():
    arrivals = make_trace("tenants", rate=40, requests=150, seed=3)
    outcome = simulate(arrivals, cost=PRESETS["h200-8b"], num_blocks=2000, max_num_seqs=32)
    for served in outcome.served:
        assert len(served.times) == served.arrival.output_len
        assert served.end == "length"
        assert served.arrival.at < served.times[0]
        assert all(gap > 0 for gap in served.gaps)


def test_the_same_trace_gives_the_same_outcome():
    def run():
        trace = make_trace("sharegpt", rate=30, requests=60, seed=1)
        return simulate(trace, cost=PRESETS["h200-8b"], num_blocks=400, policy="fair", target_itl_ms=20)

    assert run() == run()


def test_a_cache_too_small_preempts_and_all_ends_well():
    outcome = simulate([arrival(0.0, 30, 60) for _ in range(6)], num_blocks=20)
    assert outcome.num_preemptions > 0
    assert all(len(served.times) == 60 for served in outcome.served)


def test_a_shared_prefix_is_found():
    def run(shared):
        return simulate([arrival(0.0, 160, 2, shared=shared), arrival(1.0, 160, 2, shared=shared)])

    assert run(0).prefix_hit_rate == 0.0
    found = run(128)
    assert found.prefix_hit_rate == pytest.approx(128 / 320)
    assert found.served[1].ttft == pytest.approx(0.010 + 0.032)


def test_a_full_queue_refuses_and_a_deadline_ends():
    crowd = [arrival(0.0, 10, 10) for _ in range(5)]
    outcome = simulate(crowd, max_num_seqs=1, max_queued_requests=3)
    assert [served.end for served in outcome.served] == ["length"] * 3 + ["refused"] * 2
    late = simulate([arrival(0.0, 10, 50)], deadline_s=0.1).served[0]
    assert late.end == "deadline"
    assert 0 < len(late.times) < 50
    all_of_them = results(outcome)["all"]
    assert (all_of_them.requests, all_of_them.refused, all_of_them.expired) == (5, 2, 0)


def test_priority_and_fair_protect_who_fcfs_lets_wait():
    flood = [arrival(0.0, 100, 20, tenant="flood", priority=5) for _ in range(40)]
    trace = [*flood, arrival(0.01, 20, 5, tenant="guest")]
    ttft = {
        policy: results(simulate(trace, policy=policy, max_num_seqs=2))["guest"].ttft_ms_p50
        for policy in ("fcfs", "priority", "fair")
    }
    assert ttft["priority"] < ttft["fcfs"] / 5
    assert ttft["fair"] < ttft["fcfs"] / 5


def test_a_target_keeps_itl_under_it():
    trace = make_trace("long", rate=15, requests=150, seed=0)

    def itl(target):
        outcome = simulate(
            trace,
            cost=PRESETS["h200-8b"],
            num_blocks=20_000,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            target_itl_ms=target,
        )
        return results(outcome)["all"].itl_ms_p99

    assert itl(25.0) < 25.0 < itl(None)


def test_results_are_of_all_and_of_each_tenant():
    outcome = simulate([arrival(0.0, 50, 3, tenant="a"), arrival(1.0, 50, 2, tenant="b")])
    found = results(outcome, policy="fair", target_itl_ms=20)
    assert list(found) == ["all", "a", "b"]
    assert found["all"].output_tokens_per_s == pytest.approx(5 / outcome.seconds)
    assert found["a"].ttft_ms_p50 == found["a"].ttft_ms_p99 == pytest.approx(60.0)
    assert found["a"].itl_ms_p50 == pytest.approx(10.0)
    assert (found["all"].preemptions, found["a"].preemptions) == (0, None)
    assert found["b"].variant == "fair, ITL ≤ 20 ms"


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(ConfigError, match="at least 1 request"):
        simulate([])
    with pytest.raises(ConfigError, match="lower max_model_len"):
        simulate([arrival(0.0, 1000, 10)], num_blocks=10)


def test_the_executor_counts_rows_as_a_worker_does():
    executor = SimulatedExecutor(DeviceCost(1.0, 0.1, 0.01, 0.001), num_blocks=9, block_size=16, max_model_len=64)
    assert executor.start().max_model_len == 64
    prompt = NewRow(3, [7] * 5, 0, GREEDY)
    executor.submit(StepPlan(1, [prompt], [], [3], [4]))
    executor.submit(StepPlan(2, [], [], [3], [1]))
    executor.submit(StepPlan(3, [], [], [3], [1]))
    assert executor.result().token_ids == []
    assert executor.now == pytest.approx(1.404)
    assert len(executor.result().token_ids) == 1
    assert executor.now == pytest.approx(1.404 + 1.015)
    assert len(executor.result().token_ids) == 1
    assert executor.now == pytest.approx(1.404 + 1.015 + 1.016)
