"""From waiting and running requests to replicas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raylm.errors import ConfigError
from raylm.serving.autoscaling import QueuePolicy, desired_replicas


@pytest.mark.parametrize(
    ("current", "waiting", "running", "expected"),
    [
        (1, 0, 0, 1),
        (1, 4, 64, 1),  # at the target
        (1, 5, 64, 2),  # over it
        (1, 17, 64, 5),  # far over it: enough for all that wait
        (3, 13, 192, 4),
        (2, 0, 30, 1),  # one replica would be less than half full
        (2, 0, 40, 2),
        (2, 1, 0, 2),  # something waits: no scaling down
        (4, 0, 0, 3),
    ],
)
def test_replicas_follow_the_queue(current, waiting, running, expected):
    assert desired_replicas(current, waiting, running, target=4, capacity=64) == expected


def test_the_policy_adds_up_what_replicas_report():
    metrics = {
        "waiting": {"a": 3.0, "b": 7.0},
        "running": {"a": 64.0, "b": 64.0},
        "capacity": {"a": 64.0, "b": 64.0},
    }
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)
    assert QueuePolicy(target_queued_requests=4)(context)[0] == 3
    # Half of what one replica runs: one is enough.
    quiet = metrics | {"waiting": {"a": 0.0, "b": 0.0}, "running": {"a": 32.0, "b": 0.0}}
    assert QueuePolicy()(SimpleNamespace(aggregated_metrics=quiet, target_num_replicas=2))[0] == 1
    unheard = SimpleNamespace(aggregated_metrics=None, target_num_replicas=3)
    assert QueuePolicy()(unheard)[0] == 3


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match=r"'target' is unknown; allowed keys: target_queued_requests"):
        QueuePolicy(target=4)
    with pytest.raises(ConfigError, match="'target_queued_requests' has the value 0: input should be greater than 0"):
        QueuePolicy(target_queued_requests=0)
