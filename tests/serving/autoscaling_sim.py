"""The policy in Serve's own autoscaler on a simulated clock: how many replicas a changing load brings.

    python -m tests.serving.autoscaling_sim docs/images/autoscaling.svg

Replicas that start late and are heard of late: each reports every ten seconds, Serve averages over its look-back time
and applies its delays (its code, with the clock replaced). Requests are a fluid: a replica serves eight at a time, four
seconds each.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from raylm.serving.autoscaling import Demand, QueuePolicy

ROWS, SERVICE_S = 8, 4.0
TICK_S = 0.5
REPORT_S = 10.0
LOOK_BACK_S = 30.0
AT_REST = 1500.0
"""After so many seconds of an unchanged load nothing changes any more."""
TOKENS = 200


class Step(NamedTuple):
    """From a time on (seconds) requests come at this rate, in what one replica can do."""

    at: float
    rate: float


class Sample(NamedTuple):
    at: float
    rate: float
    waiting: float
    running: float
    target: int
    ready: int


class _Replica:
    def __init__(self, ready_at: float) -> None:
        self.ready_at = ready_at
        self.reports: deque[tuple[float, Demand]] = deque()

    def report(self, at: float, demand: Demand) -> None:
        if not self.reports or at - self.reports[-1][0] >= REPORT_S:
            self.reports.append((at, demand))
        while at - self.reports[0][0] > LOOK_BACK_S:
            self.reports.popleft()

    def mean(self, name: str) -> float:
        return sum(getattr(demand, name) for _, demand in self.reports) / len(self.reports)


def simulate(steps: Sequence[Step], *, seconds: float, start_s: float = 19.0, **options: float) -> list[Sample]:
    """What happens under Serve's default delays, twice a second."""
    from ray.serve import autoscaling_policy
    from ray.serve.config import AutoscalingConfig

    config = AutoscalingConfig(min_replicas=1, max_replicas=8, upscale_delay_s=5, downscale_delay_s=120)
    policy = autoscaling_policy._apply_autoscaling_config(QueuePolicy(**options))
    replicas, state, found = [_Replica(0.0)], {}, []
    open_requests, target = 0.0, 1
    for tick in range(int(seconds / TICK_S)):
        at = tick * TICK_S
        rate = next(step.rate for step in reversed(steps) if step.at <= at)
        ready = [replica for replica in replicas if replica.ready_at <= at]
        running = min(open_requests, ROWS * len(ready))
        waiting = open_requests - running
        open_requests += (rate * ROWS / SERVICE_S - running / SERVICE_S) * TICK_S
        queue_s = waiting * SERVICE_S / (ROWS * len(ready))
        share = [each / len(ready) for each in (waiting, running, waiting * TOKENS, running / ROWS)]
        for replica in ready:
            replica.report(at, Demand(share[0], share[1], ROWS, share[2], queue_s, share[3], share[1] > 0))
        with mock.patch.object(autoscaling_policy.time, "time", lambda at=at: at):
            wanted, state = policy(_context(ready, target, state, config))
        target = max(config.min_replicas, min(config.max_replicas, wanted))
        replicas += [_Replica(at + start_s) for _ in range(target - len(replicas))]
        # Serve takes those away first that do not run yet.
        replicas = sorted(replicas, key=lambda replica: replica.ready_at)[:target]
        found.append(Sample(at, rate, waiting, running, target, len(ready)))
    return found


def _context(ready: list[_Replica], target: int, state: dict[str, object], config: object) -> SimpleNamespace:
    heard = {str(at): replica for at, replica in enumerate(ready) if replica.reports}
    metrics = {name: {at: replica.mean(name) for at, replica in heard.items()} for name in Demand._fields}
    last = {
        name: {at: [SimpleNamespace(value=getattr(replica.reports[-1][1], name))] for at, replica in heard.items()}
        for name in Demand._fields
    }
    return SimpleNamespace(
        aggregated_metrics=metrics,
        raw_metrics=last,
        target_num_replicas=target,
        current_num_replicas=len(ready),
        capacity_adjusted_min_replicas=1,
        total_num_requests=0.0,
        policy_state=state,
        config=config,
    )


def reversals(samples: Sequence[Sample]) -> int:
    """How often the number of replicas turned from growing to shrinking, or back."""
    targets = [sample.target for sample in samples]
    ways = [after > before for before, after in zip(targets, targets[1:], strict=False) if after != before]
    return sum(before != after for before, after in zip(ways, ways[1:], strict=False))


def draw(path: Path) -> None:
    """A load that doubles, trebles and falls again, and what becomes of it."""
    from matplotlib.figure import Figure

    found = simulate([Step(0, 0.4), Step(120, 1.6), Step(600, 3.2), Step(1100, 0.4)], seconds=2000)
    times = [sample.at / 60 for sample in found]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(times, [sample.rate for sample in found], label="load, in what one replica can do")
    above.step(times, [sample.target for sample in found], label="replicas wanted")
    above.step(times, [sample.ready for sample in found], "--", label="replicas that serve")
    above.legend(fontsize="small")
    below.plot(times, [sample.waiting for sample in found], label="requests that wait")
    below.legend(fontsize="small")
    below.set_xlabel("minutes")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
