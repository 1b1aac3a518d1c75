"""raylm simulate: what a scheduler configuration would do with a load, without a model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.cli.options import Subparsers
from raylm.sim.traces import TRACES

if TYPE_CHECKING:
    from raylm.config.resolve import ResolvedScheduler


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("simulate", help="replay a load through the scheduler on a simulated device")
    _add_load(parser)
    _add_engine(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON lines here too")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw TTFT and ITL over the rate (.png, .svg or .pdf)"
    )
    parser.set_defaults(run=run)


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--trace", choices=tuple(TRACES), default="poisson", help="what arrives (default: %(default)s)")
    group.add_argument(
        "--rate", type=_rates, default=[10.0], metavar="R[,R...]", help="requests/s on average (default: 10)"
    )
    group.add_argument("--requests", type=_positive, default=1000, metavar="N", help="in all (default: %(default)s)")
    group.add_argument(
        "--prefix-share", type=_share, default=0.0, metavar="S", help="share of a prompt common to all of its tenant"
    )
    group.add_argument("--deadline-s", type=float, metavar="S", help="deadline of every request")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same arrivals")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--policy", action="append", choices=("fcfs", "priority", "fair"), help="repeatable (default: fcfs)"
    )
    group.add_argument(
        "--target-itl-ms",
        type=_targets,
        default=[None],
        metavar="MS[,MS...]",
        help="scheduler.target_itl_ms, or off; each policy runs with each (default: off)",
    )
    group.add_argument(
        "--prefill-chunk",
        type=_positive,
        metavar="N",
        help="scheduler.prefill_chunk (default: as in a server)",
    )
    group.add_argument("--max-prompt-share", type=float, default=1.0, metavar="S", help="scheduler.max_prompt_share")
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="default: %(default)s")
    group.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--num-blocks",
        type=_positive,
        default=55000,
        metavar="N",
        help="of 16 tokens (default: %(default)s, what an H200 has room for beside an 8B model)",
    )
    group.add_argument(
        "--cost",
        default="h200-8b",
        metavar="COST",
        help="of a step: h200-8b (default), or fixed_ms:prefill_us:decode_us:context_ns "
        "(a step, a prefill token, a decode row, a token of context read)",
    )


def run(args: argparse.Namespace) -> int:
    from raylm.bench.plot import check_plot
    from raylm.bench.report import Report
    from raylm.sim.cost import parse_cost
    from raylm.sim.plot import check_rates, draw
    from raylm.sim.report import summarize
    from raylm.sim.simulator import Setup, Simulation
    from raylm.sim.traces import make_trace

    if args.plot is not None:
        check_plot(args.plot)
        check_rates(args.rate)
    cost = parse_cost(args.cost)
    policies = dict.fromkeys(args.policy or ["fcfs"])
    configs = [_scheduler(args, policy, target) for policy in policies for target in args.target_itl_ms]
    report = Report(args.output)
    results = []
    for config in configs:
        setup = Setup(config, cost, args.num_blocks, deadline_s=args.deadline_s)
        for rate in args.rate:
            arrivals = make_trace(
                args.trace, rate=rate, requests=args.requests, seed=args.seed, prefix_share=args.prefix_share
            )
            outcome = Simulation(arrivals, setup).run()
            for result in summarize(outcome, trace=args.trace, config=config, rate=rate):
                report.add(result)
                results.append(result)
    report.print_tables()
    if args.plot is not None:
        draw(results, args.plot)
    return 0


def _scheduler(args: argparse.Namespace, policy: str, target_itl_ms: float | None) -> ResolvedScheduler:
    """Raises ConfigError."""
    from raylm.config.base import parse
    from raylm.config.resolve import FOLLOWED_PREFILL_CHUNK, ResolvedScheduler

    keys = {
        "policy": policy,
        "target_itl_ms": target_itl_ms,
        "prefill_chunk": args.prefill_chunk or FOLLOWED_PREFILL_CHUNK,
        "max_prompt_share": args.max_prompt_share,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    return parse(ResolvedScheduler, keys, source="raylm simulate")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text}")
    return value


def _rates(text: str) -> list[float]:
    rates = [float(part) for part in text.split(",")]
    if not all(0 < rate < math.inf for rate in rates):
        raise argparse.ArgumentTypeError(f"rates must be over 0 requests/s, got {text}")
    return rates


def _targets(text: str) -> list[float | None]:
    return [None if part == "off" else float(part) for part in text.split(",")]
