"""QueuePolicy in Serve's own autoscaler on a simulated clock: how many replicas a changing load brings.

Replicas start late and are heard of late: each reports every `metrics_interval_s`, Serve averages over its look-back
time and applies its delays (its code). Requests are a fluid: nothing is said of single ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from raylm.config.base import parse_foreign
from raylm.errors import ConfigError
from raylm.serving.autoscaling import Demand, QueuePolicy

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig, AutoscalingContext

DEFAULTS = {"min_replicas": 1, "max_replicas": 8, "upscale_delay_s": 5, "downscale_delay_s": 120}
"""Of Serve's autoscaling_config, where nothing else is said."""
_TICK_S = 0.5


class Step(NamedTuple):
    """From a time on (seconds) so many requests/s come."""

    at: float
    rate: float


class Sample(NamedTuple):
    """One moment: what comes, requests that wait and run at all replicas, replicas wanted and those that serve."""

    at: float
    rate: float
    waiting: float
    running: float
    target: int
    ready: int


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """Every replica: it serves `rows` requests at a time, each in `service_s` seconds, from `start_s` seconds after it
    was wanted on. Its KV cache is as full as its rows."""

    rows: int = 8
    service_s: float = 4.0
    start_s: float = 19.0
    prompt_tokens: int = 200
    """Of a request, for target_queued_tokens."""


class _Replica:
    def __init__(self, ready_at: float) -> None:
        self.ready_at = ready_at
        self.reports: deque[tuple[float, Demand]] = deque()

    def report(self, at: float, demand: Demand, config: AutoscalingConfig) -> None:
        if not self.reports or at - self.reports[-1][0] >= config.metrics_interval_s:
            self.reports.append((at, demand))
        while at - self.reports[0][0] > config.look_back_period_s:
            self.reports.popleft()

    def mean(self, name: str) -> float:
        total: float = sum(getattr(demand, name) for _, demand in self.reports)
        return total / len(self.reports)


def serve_options(given: Mapping[str, object], *, source: str) -> AutoscalingConfig:
    """Serve's autoscaling_config, but for its policy. Raises ConfigError."""
    from ray.serve.config import AutoscalingConfig

    if "policy" in given:
        raise ConfigError(f"{source}: 'policy' is not taken here; its policy_kwargs are given on their own")
    config = parse_foreign(AutoscalingConfig, {**DEFAULTS, **given}, source=source)
    if config.min_replicas < 1:
        raise ConfigError(f"{source}: 'min_replicas' is {config.min_replicas}; no simulated model sleeps: at least 1")
    return config


def simulate(
    steps: Sequence[Step], kind: ReplicaKind, config: AutoscalingConfig, policy: QueuePolicy, *, seconds: float
) -> list[Sample]:
    """What happens, twice a second. The first step is at 0."""
    replicas = [_Replica(0.0) for _ in range(config.initial_replicas or config.min_replicas)]
    state: dict[str, Any] = {}
    found: list[Sample] = []
    open_requests, target = 0.0, len(replicas)
    for tick in range(int(seconds / _TICK_S)):
        at = tick * _TICK_S
        rate = next(step.rate for step in reversed(steps) if step.at <= at)
        ready = [replica for replica in replicas if replica.ready_at <= at]
        running = min(open_requests, kind.rows * len(ready))
        waiting = open_requests - running
        open_requests += (rate - running / kind.service_s) * _TICK_S
        demand = _demand(kind, waiting, running, len(ready))
        for replica in ready:
            replica.report(at, demand, config)
        wanted, _ = policy(_context(ready, target))
        target = _patient(_scaled(wanted, len(ready), config), target, at, state, config)
        replicas += [_Replica(at + kind.start_s) for _ in range(target - len(replicas))]
        # Serve takes those away first that do not run yet.
        replicas = sorted(replicas, key=lambda replica: replica.ready_at)[:target]
        found.append(Sample(at, rate, waiting, running, target, len(ready)))
    return found


def _demand(kind: ReplicaKind, waiting: float, running: float, count: int) -> Demand:
    """What each of so many replicas says that share these requests."""
    return Demand(
        waiting=waiting / count,
        running=running / count,
        capacity=kind.rows,
        waiting_tokens=waiting * kind.prompt_tokens / count,
        queue_s=waiting * kind.service_s / (kind.rows * count),
        kv_usage=running / (kind.rows * count),
        worked=running > 0,
    )


def _scaled(wanted: int, count: int, config: AutoscalingConfig) -> int:
    """With Serve's upscaling_factor and downscaling_factor."""
    from ray.serve.autoscaling_policy import _apply_scaling_factors

    scaled: int = _apply_scaling_factors(wanted, count, config)
    return scaled


def _patient(wanted: int, target: int, at: float, state: dict[str, Any], config: AutoscalingConfig) -> int:
    """Serve's delays and bounds."""
    from ray.serve.autoscaling_policy import _apply_delay_logic

    decided, _ = _apply_delay_logic(wanted, target, config, state, _now=at)
    return int(max(config.min_replicas, min(config.max_replicas, decided)))


def _context(ready: list[_Replica], target: int) -> AutoscalingContext:
    """What the policy reads of Serve's context."""
    heard = {str(at): replica for at, replica in enumerate(ready) if replica.reports}
    metrics = {name: {at: replica.mean(name) for at, replica in heard.items()} for name in Demand._fields}
    last = {
        name: {at: [SimpleNamespace(value=getattr(replica.reports[-1][1], name))] for at, replica in heard.items()}
        for name in Demand._fields
    }
    context = SimpleNamespace(
        aggregated_metrics=metrics,
        raw_metrics=last,
        target_num_replicas=target,
        current_num_replicas=len(ready),
        capacity_adjusted_min_replicas=1,
        total_num_requests=0.0,
    )
    return cast("AutoscalingContext", context)


def reversals(samples: Sequence[Sample]) -> int:
    """How often the number of replicas turned from growing to shrinking, or back."""
    targets = [sample.target for sample in samples]
    ways = [after > before for before, after in zip(targets, targets[1:], strict=False) if after != before]
    return sum(before != after for before, after in zip(ways, ways[1:], strict=False))
