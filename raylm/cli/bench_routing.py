"""raylm bench routing: the cost of a choice of engine, and what policies do with conversations."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.cli.options import json_object, positive

if TYPE_CHECKING:
    from raylm.serving.routing.measuring import PolicyResult


def add_routing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=1500, metavar="N", help="conversations; 0: the cost alone")
    parser.add_argument("--rate", type=float, default=24.0, metavar="R", help="new conversations a second")
    parser.add_argument("--replicas", type=positive, default=4, metavar="N", help="engines (default: %(default)s)")
    parser.add_argument(
        "--num-blocks", type=positive, default=24_000, metavar="N", help="of an engine (default: %(default)s)"
    )
    parser.add_argument(
        "--routing", type=json_object, default={}, metavar="JSON", help='keys of routing: {"prefix_weight": 4}'
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the policies (.png, .svg or .pdf)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """JSON lines: first the costs, then the policies, beside one engine that is as large and fast as all together."""
    from raylm.bench.plot import check_plot
    from raylm.config.base import parse
    from raylm.config.routing import RoutingConfig
    from raylm.errors import ConfigError
    from raylm.serving.routing.measuring import cost_of_a_choice, measure_policy

    if args.plot is not None:
        check_plot(args.plot)
    if "policy" in args.routing:
        raise ConfigError("--routing: 'policy' is not taken; all of them are measured")
    routing = parse(RoutingConfig, args.routing, source="--routing")
    for engines in (1, 4, 8):
        for tokens in (100, 1000, 4000, 32_000):
            _say(dataclasses.asdict(cost_of_a_choice(engines, tokens)))
    if not args.sessions:
        return 0
    load = {"rate": args.rate, "sessions": args.sessions, "routing": routing}
    many = {**load, "replicas": args.replicas, "num_blocks": args.num_blocks}
    whole = args.replicas * args.num_blocks
    kinds = {
        "one engine,\nall memory": partial(
            measure_policy, "prefix", replicas=1, num_blocks=whole, speed=args.replicas, **load
        ),
        "prefix": partial(measure_policy, "prefix", **many),
        "prefix,\n4 ingresses": partial(measure_policy, "prefix", ingresses=4, **many),
        "prefix,\nsessions": partial(measure_policy, "prefix", named=True, **many),
        "load": partial(measure_policy, "load", **many),
        "power of two": partial(measure_policy, "power_of_two", **many),
        "round robin": partial(measure_policy, "round_robin", **many),
    }
    results = {}
    for name, measure in kinds.items():
        results[name] = measure()
        _say(dataclasses.asdict(results[name]))
    if args.plot is not None:
        draw(results, args.plot)
    return 0


def draw(results: Mapping[str, PolicyResult], path: Path) -> None:
    """Hit rates and times to the first token as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    rates, times = figure.subplots(1, 2)
    rates.barh(list(results), [each.hit_rate for each in results.values()])
    rates.set_xlabel("share of prompt tokens found in the cache")
    times.barh(list(results), [each.ttft_ms_p99 for each in results.values()], label="p99", alpha=0.5)
    times.barh(list(results), [each.ttft_ms_p50 for each in results.values()], label="p50")
    times.set_xlabel("time to first token (ms)")
    times.set_yticklabels([])
    times.legend()
    for axes in (rates, times):
        axes.invert_yaxis()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _say(result: dict[str, object]) -> None:
    print(json.dumps(result), flush=True)
