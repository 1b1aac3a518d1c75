"""raylm bench routing: the cost of a choice of engine, and what policies do with conversations."""

from __future__ import annotations

import argparse
import dataclasses
import json

from raylm.cli.options import positive


def add_routing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=1500, metavar="N", help="conversations; 0: the cost alone")
    parser.add_argument("--rate", type=float, default=24.0, metavar="R", help="new conversations a second")
    parser.add_argument("--replicas", type=positive, default=4, metavar="N", help="engines (default: %(default)s)")
    parser.add_argument(
        "--num-blocks", type=positive, default=24_000, metavar="N", help="of an engine (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """JSON lines: first the costs, then the policies, beside one engine that is as large and fast as all together."""
    from raylm.serving.routing.measuring import cost_of_a_choice, measure_policy

    for engines in (1, 4, 8):
        for tokens in (100, 1000, 4000, 32_000):
            _say(dataclasses.asdict(cost_of_a_choice(engines, tokens)))
    if not args.sessions:
        return 0
    load = {"rate": args.rate, "sessions": args.sessions}
    many = {**load, "replicas": args.replicas, "num_blocks": args.num_blocks}
    whole = args.replicas * args.num_blocks
    _say(dataclasses.asdict(measure_policy("prefix", replicas=1, num_blocks=whole, speed=args.replicas, **load)))
    for ingresses in (1, 4):
        _say(dataclasses.asdict(measure_policy("prefix", ingresses=ingresses, **many)))
    _say(dataclasses.asdict(measure_policy("prefix", named=True, **many)))
    for policy in ("load", "power_of_two", "round_robin"):
        _say(dataclasses.asdict(measure_policy(policy, **many)))
    return 0


def _say(result: dict[str, object]) -> None:
    print(json.dumps(result), flush=True)
