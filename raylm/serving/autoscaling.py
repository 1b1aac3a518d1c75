"""From waiting requests to replicas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from raylm.config.application import QueuePolicyConfig
from raylm.config.base import parse

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

WAITING = "waiting"
RUNNING = "running"
CAPACITY = "capacity"
POLICY_PATH = "raylm.serving.autoscaling:QueuePolicy"
"""What a Serve config file calls the policy."""


class QueuePolicy:
    """Keeps the waiting requests a replica under a target. Serve applies bounds and delays to the result."""

    def __init__(self, **options: float) -> None:
        """`options` are QueuePolicyConfig's. Raises ConfigError."""
        config = parse(QueuePolicyConfig, options, source=f"policy_kwargs of {POLICY_PATH}")
        self._target = config.target_queued_requests

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        capacities = metrics.get(CAPACITY, {}).values()
        current = context.target_num_replicas
        if not capacities:
            return current, {}  # No replica has reported yet.
        waiting = sum(metrics.get(WAITING, {}).values())
        running = sum(metrics.get(RUNNING, {}).values())
        capacity = sum(capacities) / len(capacities)
        return desired_replicas(current, waiting, running, target=self._target, capacity=capacity), {}


def desired_replicas(current: int, waiting: float, running: float, *, target: float, capacity: float) -> int:
    """Replicas wanted: up while more than `target` wait at each, down when one fewer would still be half empty.

    `capacity`: requests that one replica runs at a time.
    """
    if waiting > target * current:
        return max(current + 1, math.ceil(waiting / target))
    if waiting == 0 and current > 1 and running <= (current - 1) * capacity / 2:
        return current - 1
    return current
