"""How many replicas a model and the HTTP face need, for Serve's autoscaler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from raylm.config.application import IngressPolicyConfig, QueuePolicyConfig
from raylm.config.base import parse
from raylm.core.load import Load

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

POLICY_PATH = "raylm.serving.autoscaling:QueuePolicy"
INGRESS_POLICY_PATH = "raylm.serving.autoscaling:IngressPolicy"
"""What a Serve config file calls the policies."""
_Said = list[dict[str, float]]
"""Of each replica, its values by name."""
_MOST_AT_ONCE = 2.0
"""However long the queue is, so many times the replicas there are and no more: half of a queue is old work."""
_FULL = 0.5
"""Where one replica fewer would be fuller than this, none goes. Far below what adds one, so that a load that stays the
same never does both."""


class Demand(NamedTuple):
    """What one replica says of its engine, of late. `capacity`: requests that it runs at a time. `worked`: 1 where it
    has generated anything since it said so last; what runs and waits is known of that moment alone."""

    waiting: float
    running: float
    capacity: float
    waiting_tokens: float
    queue_s: float
    kv_usage: float
    worked: float

    @classmethod
    def of(cls, load: Load, capacity: int, *, since: Load) -> Demand:
        """`since`: the load when it said so last."""
        worked = load.num_generated != since.num_generated
        return cls(load.waiting, load.running, capacity, load.waiting_tokens, load.queue_s, load.kv_usage, worked)

    def stats(self) -> dict[str, float]:
        """For Serve, which averages each."""
        return {name: float(value) for name, value in self._asdict().items()}


class QueuePolicy:
    """Keeps the queues of a model's engines short. Serve applies bounds and delays to the result."""

    def __init__(self, **options: float) -> None:
        """`options` are QueuePolicyConfig's. Raises ConfigError."""
        self._config = parse(QueuePolicyConfig, options, source=f"policy_kwargs of {POLICY_PATH}")

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now, lately = ([Demand(**said) for said in each] for each in _heard(context, Demand._fields))
        current = context.target_num_replicas
        if not now:
            return current, {}  # No replica has reported yet.
        may_sleep = context.capacity_adjusted_min_replicas == 0 and current == 1 and context.total_num_requests == 0
        if may_sleep and is_idle(now) and is_idle(lately):
            return 0, {}
        wanted = desired_replicas(current, now, self._config)
        return _patient(wanted, desired_replicas(current, lately, self._config), context), {}


def is_idle(demands: list[Demand]) -> bool:
    """Whether nothing runs, waits, or has come and gone meanwhile."""
    return not any(each.waiting or each.running or each.worked for each in demands)


def desired_replicas(current: int, demands: list[Demand], config: QueuePolicyConfig) -> int:
    """Replicas wanted: up while more waits at each than the targets allow, down by one when nobody waits and one fewer
    would be half full at most, by rows and by KV cache."""
    waiting = sum(each.waiting for each in demands)
    count = len(demands)
    needed = [waiting / config.target_queued_requests]
    if config.target_queued_tokens is not None:
        needed.append(sum(each.waiting_tokens for each in demands) / config.target_queued_tokens)
    if config.target_queue_s is not None:
        needed.append(current * sum(each.queue_s for each in demands) / count / config.target_queue_s)
    kv_usage = sum(each.kv_usage for each in demands)
    if max(needed) > current:
        return min(max(current + 1, math.ceil(max(needed))), math.ceil(_MOST_AT_ONCE * current))
    if waiting and kv_usage / count > config.max_kv_usage:
        return current + 1
    running, capacity = sum(each.running for each in demands), sum(each.capacity for each in demands) / count
    if waiting == 0 and current > 1:
        others = current - 1
        if running <= _FULL * others * capacity and kv_usage <= _FULL * others:
            return others
    return current


class IngressDemand(NamedTuple):
    """What one ingress says of itself, of late. `busy`: the share of the time that its event loop works."""

    open_requests: float
    busy: float

    def stats(self) -> dict[str, float]:
        """For Serve, which averages each."""
        return {name: float(value) for name, value in self._asdict().items()}


class IngressPolicy:
    """Keeps ingresses from being what requests wait for. Serve applies bounds and delays to the result."""

    def __init__(self, **options: float) -> None:
        """`options` are IngressPolicyConfig's. Raises ConfigError."""
        self._config = parse(IngressPolicyConfig, options, source=f"policy_kwargs of {INGRESS_POLICY_PATH}")

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        now, lately = ([IngressDemand(**said) for said in each] for each in _heard(context, IngressDemand._fields))
        current = context.target_num_replicas
        if not now:
            return current, {}
        wanted = desired_ingresses(current, now, self._config)
        return _patient(wanted, desired_ingresses(current, lately, self._config), context), {}


def desired_ingresses(current: int, demands: list[IngressDemand], config: IngressPolicyConfig) -> int:
    """Ingresses wanted: up while requests or work are over the targets, down by one when one fewer would be at half of
    both at most."""
    requests = sum(each.open_requests for each in demands) / config.target_open_requests
    busy = sum(each.busy for each in demands) / config.max_busy
    needed = max(requests, busy)
    if needed > current:
        return min(max(current + 1, math.ceil(needed)), math.ceil(_MOST_AT_ONCE * current))
    return current - 1 if current > 1 and needed <= _FULL * (current - 1) else current


def _patient(now: int, lately: int, context: AutoscalingContext) -> int:
    """What is wanted by what was last heard and by the mean of late, where both want more or both want fewer. No more
    while some are still starting: what waits meanwhile is what they are for."""
    current = context.target_num_replicas
    if now > current < lately:
        return now if context.current_num_replicas >= current else current
    return max(now, lately) if now < current > lately else current


def _heard(context: AutoscalingContext, names: tuple[str, ...]) -> tuple[_Said, _Said]:
    """What each replica says under these names: what was last heard, and Serve's means over its look-back time."""
    last = {
        name: {replica: series[-1].value for replica, series in by_replica.items() if series}
        for name, by_replica in (context.raw_metrics or {}).items()
    }
    return _by_replica(last, names), _by_replica(context.aggregated_metrics or {}, names)


def _by_replica(metrics: Mapping[str, Mapping[Any, float]], names: tuple[str, ...]) -> _Said:
    """What each replica says, where it says all of it."""
    replicas = list(metrics.get(names[0], {}))
    return [
        {name: metrics[name][replica] for name in names}
        for replica in replicas
        if all(replica in metrics.get(name, {}) for name in names)
    ]
