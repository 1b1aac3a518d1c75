"""From what replicas say to how many there are."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.cli import main
from raylm.config.application import IngressPolicyConfig, QueuePolicyConfig
from raylm.core.load import Load
from raylm.errors import ConfigError
from raylm.serving.autoscaling import (
    Demand,
    IngressDemand,
    IngressPolicy,
    QueuePolicy,
    desired_ingresses,
    desired_replicas,
)
from raylm.serving.autoscaling_sim import ReplicaKind, Sample, Step, reversals, serve_options, simulate

AT_REST = 1500.0
"""After so many seconds of an unchanged load nothing changes any more."""


def demands(count: int, *, capacity: int = 64, **total: float) -> list[Demand]:
    """What so many replicas say that share these totals."""
    names = [name for name in Demand._fields if name != "capacity"]
    return [Demand(capacity=capacity, **{name: total.get(name, 0) / count for name in names})] * count


@pytest.mark.parametrize(
    ("current", "waiting", "running", "expected"),
    [
        (1, 0, 0, 1),
        (1, 4, 64, 1),  # at the target
        (1, 5, 64, 2),  # over it
        (2, 11, 128, 3),
        (1, 170, 64, 2),  # far over it: twice as many at once, and no more
        (4, 29, 256, 8),
        (2, 0, 30, 1),  # one replica would be less than half full
        (2, 0, 40, 2),
        (2, 1, 0, 2),  # something waits: no scaling down
        (4, 0, 0, 3),
    ],
)
def test_replicas_follow_the_queue(current, waiting, running, expected):
    found = demands(current, waiting=waiting, running=running)
    assert desired_replicas(current, found, QueuePolicyConfig(target_queued_requests=4)) == expected


def test_prompts_that_wait_seconds_in_the_queue_and_a_full_cache_add_replicas():
    by_tokens = QueuePolicyConfig(target_queued_tokens=10_000)
    assert desired_replicas(2, demands(2, waiting=2, waiting_tokens=25_000), by_tokens) == 3
    assert desired_replicas(2, demands(2, waiting=2, waiting_tokens=20_000), by_tokens) == 2
    by_time = QueuePolicyConfig(target_queue_s=1.0)
    assert desired_replicas(2, demands(2, waiting=3, queue_s=3.0), by_time) == 3
    assert desired_replicas(2, demands(2, waiting=3, queue_s=2.0), by_time) == 2
    full = QueuePolicyConfig(max_kv_usage=0.9)
    assert desired_replicas(2, demands(2, waiting=1, running=20, kv_usage=1.9), full) == 3
    assert desired_replicas(2, demands(2, waiting=0, running=20, kv_usage=1.9), full) == 2, "nobody waits for it"
    assert desired_replicas(2, demands(2, running=8, kv_usage=0.8), full) == 2, "one would be four fifths full"
    assert desired_replicas(2, demands(2, running=8, kv_usage=0.4), full) == 1


def context(found, current: int, policy=Demand, *, last=None, **more) -> SimpleNamespace:
    def told(demands):
        return {name: {str(at): getattr(one, name) for at, one in enumerate(demands)} for name in policy._fields}

    series = {
        name: {replica: [SimpleNamespace(value=-1.0), SimpleNamespace(value=value)] for replica, value in each.items()}
        for name, each in told(found if last is None else last).items()
    }
    said = {"capacity_adjusted_min_replicas": 1, "total_num_requests": 0.0, "current_num_replicas": current}
    return SimpleNamespace(
        aggregated_metrics=told(found), raw_metrics=series, target_num_replicas=current, **(said | more)
    )


def test_the_policy_adds_up_what_replicas_report():
    busy, quiet = demands(2, waiting=10, running=128), demands(2, running=32)
    assert QueuePolicy(target_queued_requests=4)(context(busy, 2))[0] == 3
    # Half of what one replica runs: one is enough.
    assert QueuePolicy()(context(quiet, 2))[0] == 1
    assert QueuePolicy()(context([], 3))[0] == 3
    nothing = SimpleNamespace(aggregated_metrics=None, raw_metrics=None, target_num_replicas=3)
    assert QueuePolicy()(nothing)[0] == 3 and IngressPolicy()(nothing)[0] == 3


def test_what_was_a_while_ago_and_what_is_only_now_change_nothing():
    busy, quiet = demands(2, waiting=10, running=128), demands(2, running=32)
    assert QueuePolicy()(context(busy, 2, last=quiet))[0] == 2
    assert QueuePolicy()(context(quiet, 2, last=busy))[0] == 2
    assert QueuePolicy()(context(demands(1, waiting=30, running=64), 2, current_num_replicas=1))[0] == 2, "one starts"


def test_only_an_idle_model_that_may_sleeps():
    zero = {"capacity_adjusted_min_replicas": 0}
    assert QueuePolicy()(context(demands(1), 1, **zero))[0] == 0
    assert QueuePolicy()(context(demands(1), 1))[0] == 1
    assert QueuePolicy()(context(demands(1, running=0.01), 1, last=demands(1), **zero))[0] == 1
    assert QueuePolicy()(context(demands(1, worked=1), 1, **zero))[0] == 1, "somebody came and went"
    assert QueuePolicy()(context(demands(1), 1, total_num_requests=1.0, **zero))[0] == 1, "somebody waits for it"
    assert QueuePolicy()(context(demands(2), 2, **zero))[0] == 1, "the last one goes by itself"


def test_what_a_replica_says():
    load = Load(3, 2, 0.5, waiting_tokens=70, queue_s=1.5, num_generated=9)
    said = Demand.of(load, 8, since=load._replace(num_generated=0)).stats()
    assert said == {
        "waiting": 2.0, "running": 3.0, "capacity": 8.0, "waiting_tokens": 70.0, "queue_s": 1.5, "kv_usage": 0.5,
        "worked": 1.0,
    }  # fmt: skip
    assert Demand.of(load, 8, since=load).worked == 0


@pytest.mark.parametrize(
    ("current", "open_requests", "busy", "expected"),
    [
        (1, 100, 0.3, 1),
        (1, 257, 0.3, 2),
        (1, 100, 0.8, 2),
        (1, 5000, 1.0, 2),  # twice as many at once
        (2, 100, 0.3, 1),
        (2, 100, 0.5, 2),  # one would be busier than half of the target
        (3, 250, 0.6, 2),
    ],
)
def test_ingresses_follow_requests_and_work(current, open_requests, busy, expected):
    found = [IngressDemand(open_requests / current, busy / current)] * current
    assert desired_ingresses(current, found, IngressPolicyConfig()) == expected
    assert IngressPolicy()(context(found, current, IngressDemand))[0] == expected


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match=r"'target' is unknown .*allowed keys: max_kv_usage, target_queue_s"):
        QueuePolicy(target=4)
    with pytest.raises(ConfigError, match="'target_queued_requests' has the value 0: input should be greater than 0"):
        QueuePolicy(target_queued_requests=0)
    with pytest.raises(ConfigError, match="'busy' is unknown .*allowed keys: max_busy, target_open_requests"):
        IngressPolicy(busy=1)


def replicas_of(rates: list[tuple[float, float]], *, seconds: float, start_s: float = 19.0) -> list[Sample]:
    """A simulation with Serve's default delays; rates are in what one replica can do."""
    kind = ReplicaKind(start_s=start_s)
    steps = [Step(at, rate * kind.rows / kind.service_s) for at, rate in rates]
    return simulate(steps, kind, serve_options({}, source="test"), QueuePolicy(), seconds=seconds)


def test_a_load_step_adds_replicas_once_and_takes_them_away_once():
    found = replicas_of([(0, 0.3), (60, 1.6), (360, 0.3)], seconds=1100)
    assert reversals(found) == 1
    assert found[-1].target == 1
    # What waits while the second one starts brings more of them.
    assert max(sample.target for sample in found) <= 5
    assert max(sample.waiting for sample in found if sample.at > 200) == 0


LOADS = given(rates=st.lists(st.floats(0.05, 6.0), min_size=1, max_size=4), start_s=st.floats(1, 90))


@settings(max_examples=4, deadline=None)
@LOADS
def test_each_change_of_load_turns_the_number_at_most_once(rates, start_s):
    check_reversals(rates, start_s)


@pytest.mark.nightly
@settings(max_examples=100, deadline=None)
@LOADS
def test_each_of_many_changes_of_load_turns_the_number_at_most_once(rates, start_s):
    check_reversals(rates, start_s)


def check_reversals(rates, start_s):
    steps = [(index * AT_REST, rate) for index, rate in enumerate(rates)]
    found = replicas_of(steps, seconds=AT_REST * len(rates), start_s=start_s)
    for index in range(len(rates)):
        part = [sample for sample in found if index * AT_REST <= sample.at < (index + 1) * AT_REST]
        assert reversals(part) <= 1, (rates, start_s)


def bench(*options: str) -> int:
    return main(["bench", "autoscaling", *options])


def test_the_command_prints_each_change_and_a_summary_of_each_step(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "replicas.svg"
    assert bench("--load", "0:0.8,120:3.2", "--seconds", "600", "--plot", str(plot)) == 0
    *changes, before, after = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["target"] for line in changes] == [1, 1, 2, 2, 4, 4, 5, 5, 4, 4]
    assert (before["most_replicas"], before["reversals"], before["quiet_after_s"]) == (1, 0, 0)
    assert (after["rate"], after["most_replicas"], after["last_replicas"], after["reversals"]) == (3.2, 5, 4, 1)
    assert plot.stat().st_size > 1000


def test_the_command_takes_the_policy_and_what_serve_takes(capsys):
    assert bench("--load", "0:0.8,120:3.2", "--seconds", "600", "--serve", '{"max_replicas": 2}') == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["most_replicas"] == 2
    policy = '{"target_queued_requests": 1000, "max_kv_usage": 1}'
    assert bench("--load", "0:0.8,120:3.2", "--seconds", "600", "--policy", policy) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["most_replicas"] == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--load", "5:1"], "seconds begin at 0 and grow"),
        (["--load", "0:1,3000:2"], "to less than --seconds 2000"),
        (["--load", "0:1,fast"], "SECOND:RATE is expected"),
        (["--load", "0:-1"], "0 or more requests/s"),
        (["--policy", '{"target": 1}'], "'target' is unknown"),
        (["--serve", '{"min_replicas": 0}'], "no simulated model sleeps"),
        (["--serve", '{"max_replica": 2}'], "'max_replica' is unknown"),
        (["--serve", '{"policy": {}}'], "'policy' is not taken here"),
    ],
)
def test_the_command_refuses(options, said, capsys):
    assert bench(*options) == 2
    assert said in capsys.readouterr().err
