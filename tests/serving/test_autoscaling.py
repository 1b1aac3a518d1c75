"""From waiting and running requests to replicas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raylm.config.application import AutoscalingConfig
from raylm.serving.autoscaling import QueuePolicy, desired_replicas, serve_autoscaling


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
    metrics = {"waiting": {"a": 3.0, "b": 7.0}, "running": {"a": 64.0, "b": 64.0}}
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2)
    assert QueuePolicy(target=4, capacity=64)(context)[0] == 3
    idle = SimpleNamespace(aggregated_metrics=None, target_num_replicas=1)
    assert QueuePolicy(target=4, capacity=64)(idle)[0] == 1


def test_settings_reach_serve():
    config = AutoscalingConfig(min_replicas=2, max_replicas=5, target_queued_requests=3, upscale_delay_s=1)
    settings = serve_autoscaling(config, capacity=8)
    assert (settings.min_replicas, settings.max_replicas, settings.upscale_delay_s) == (2, 5, 1)
    assert settings.policy.policy_kwargs == {"target": 3, "capacity": 8}
