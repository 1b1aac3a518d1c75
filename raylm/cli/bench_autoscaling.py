"""raylm bench autoscaling: how many replicas a changing load brings, on a simulated clock."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.cli.options import json_object, positive

if TYPE_CHECKING:
    from raylm.serving.autoscaling_sim import Sample, Step

_LOAD = "0:0.8,120:3.2,600:6.4,1100:0.8"


def add_autoscaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load", default=_LOAD, metavar="S:R[,S:R...]", help="requests/s from a second on (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=_seconds, default=2000.0, metavar="S", help="in all (default: %(default)s)")
    parser.add_argument(
        "--rows", type=positive, default=8, metavar="N", help="requests that a replica runs at a time (default: 8)"
    )
    parser.add_argument("--service-s", type=_seconds, default=4.0, metavar="S", help="of a request (default: 4)")
    parser.add_argument("--start-s", type=_seconds, default=19.0, metavar="S", help="of a replica (default: 19)")
    parser.add_argument(
        "--prompt-tokens", type=positive, default=200, metavar="N", help="of a request (default: %(default)s)"
    )
    parser.add_argument(
        "--policy", type=json_object, default={}, metavar="JSON", help='policy_kwargs: {"target_queued_requests": 4}'
    )
    parser.add_argument(
        "--serve",
        type=json_object,
        default={},
        metavar="JSON",
        help='autoscaling_config without its policy: {"max_replicas": 8, "downscale_delay_s": 120}',
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it over time (.png, .svg or .pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """JSON lines: each change of the load or of the replicas, then a summary of each step of the load."""
    from raylm.bench.plot import check_plot
    from raylm.serving.autoscaling import QueuePolicy
    from raylm.serving.autoscaling_sim import ReplicaKind, serve_options, simulate

    if args.plot is not None:
        check_plot(args.plot)
    steps = _steps(args.load, args.seconds)
    kind = ReplicaKind(args.rows, args.service_s, args.start_s, args.prompt_tokens)
    config = serve_options(args.serve, source="--serve")
    found = simulate(steps, kind, config, QueuePolicy(**args.policy), seconds=args.seconds)
    before: tuple[float, int, int] | None = None
    for sample in found:
        if (now := (sample.rate, sample.target, sample.ready)) != before:
            _say({**sample._asdict(), "waiting": round(sample.waiting, 1), "running": round(sample.running, 1)})
            before = now
    for step, end in zip(steps, [*(step.at for step in steps[1:]), args.seconds], strict=True):
        _say(_summary(step, [sample for sample in found if step.at <= sample.at < end]))
    if args.plot is not None:
        draw(found, args.rows / args.service_s, args.plot)
    return 0


def _summary(step: Step, samples: Sequence[Sample]) -> dict[str, object]:
    """Of one step of the load. `quiet_after_s`: the last moment at which anybody waited, from its beginning."""
    from raylm.serving.autoscaling_sim import reversals

    waited = [sample.at - step.at for sample in samples if sample.waiting > 0]
    return {
        "load_from_s": step.at,
        "rate": step.rate,
        "most_replicas": max(sample.target for sample in samples),
        "last_replicas": samples[-1].target,
        "most_waiting": round(max(sample.waiting for sample in samples), 1),
        "quiet_after_s": max(waited, default=0.0),
        "reversals": reversals(samples),
    }


def draw(found: Sequence[Sample], per_replica: float, path: Path) -> None:
    """Replicas and the load, in what one replica can do, above; the queue below."""
    from matplotlib.figure import Figure

    times = [sample.at / 60 for sample in found]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(times, [sample.rate / per_replica for sample in found], label="load, in what one replica can do")
    above.step(times, [sample.target for sample in found], label="replicas wanted")
    above.step(times, [sample.ready for sample in found], "--", label="replicas that serve")
    above.legend(fontsize="small")
    below.plot(times, [sample.waiting for sample in found], label="requests that wait")
    below.legend(fontsize="small")
    below.set_xlabel("minutes")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def _steps(text: str, seconds: float) -> list[Step]:
    """Raises ConfigError."""
    from raylm.errors import ConfigError
    from raylm.serving.autoscaling_sim import Step

    try:
        steps = [Step(float(at), float(rate)) for at, _, rate in (part.partition(":") for part in text.split(","))]
    except ValueError:
        raise ConfigError(f"--load {text!r}: SECOND:RATE is expected, such as 0:1,120:4") from None
    times = [step.at for step in steps]
    if times[0] != 0 or any(not before < after for before, after in zip(times, [*times[1:], seconds], strict=True)):
        raise ConfigError(f"--load {text!r}: seconds begin at 0 and grow, to less than --seconds {seconds:g}")
    if not all(0 <= step.rate < math.inf for step in steps):
        raise ConfigError(f"--load {text!r}: rates must be 0 or more requests/s")
    return steps


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be over 0, got {text}")
    return value


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)
