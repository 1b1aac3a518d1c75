"""From waiting requests to replicas."""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from raylm.config.application import AutoscalingConfig

WAITING = "waiting"
RUNNING = "running"
_LOOK_BACK_S = 15.0
"""Serve averages what replicas report over this time; replicas report every 10 s."""


class QueuePolicy:
    """Keeps the waiting requests a replica under a target. Serve applies bounds and delays to what it returns."""

    def __init__(self, target: float, capacity: int) -> None:
        """`target`: waiting requests a replica. `capacity`: requests that one replica runs at a time."""
        self._target = target
        self._capacity = capacity

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        waiting = sum(metrics.get(WAITING, {}).values())
        running = sum(metrics.get(RUNNING, {}).values())
        return desired_replicas(
            context.target_num_replicas, waiting, running, target=self._target, capacity=self._capacity
        ), {}


def desired_replicas(current: int, waiting: float, running: float, *, target: float, capacity: int) -> int:
    """Replicas wanted: up while more than `target` wait at each, down when one fewer would still be half empty."""
    if waiting > target * current:
        return max(current + 1, math.ceil(waiting / target))
    if waiting == 0 and current > 1 and running <= (current - 1) * capacity / 2:
        return current - 1
    return current


def serve_autoscaling(config: AutoscalingConfig, *, capacity: int) -> ServeAutoscalingConfig:
    """Serve's settings for one model."""
    return ServeAutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        initial_replicas=config.min_replicas,
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        look_back_period_s=_LOOK_BACK_S,
        policy=AutoscalingPolicy(
            policy_function="raylm.serving.autoscaling:QueuePolicy",
            policy_kwargs={"target": config.target_queued_requests, "capacity": capacity},
        ),
    )
