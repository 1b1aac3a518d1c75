"""raylm bench sweep: the same load under many settings of the engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from raylm.cli.bench_serve import add_report, add_requests, requests_of
from raylm.cli.options import add_engine_options, add_model, engine_config, positive
from raylm.errors import ConfigError


def add_sweep(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    group = parser.add_argument_group("points")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=A,B,...",
        help="a key of the engine's configuration, such as scheduler.max_num_seqs=16,64; of several, all combinations",
    )
    group.add_argument("--grid", metavar="FILE", help="YAML: keys with lists of values, or a list of points")
    group.add_argument("--serve", action="store_true", help="a fresh server a point, with the load of bench serve")
    group.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="of a server (%(default)g)")
    parser.add_argument("--repeat", type=positive, default=1, metavar="N", help="offline: measure N times, the median")
    add_requests(parser)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (%(default)s)")
    add_engine_options(parser)
    add_report(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """1 where not a single point could be measured."""
    from raylm.bench.plot import check_plot
    from raylm.bench.report import FailedPoint, Report, ServeResult
    from raylm.bench.serve import Load, Target, sweep
    from raylm.bench.sweep import Found, draw_sweep, make_points, read_grid, sweep_offline, sweep_servers

    if args.plot is not None:
        check_plot(args.plot)
    points = make_points(engine_config(args), read_grid(args.set, args.grid))
    asked = requests_of(args)
    report = Report(args.output)
    found: list[Found] = []

    def emit(result: Found) -> None:
        found.append(result)
        report.add(result)

    if args.serve:

        def measure(url: str, model: str, told: Callable[[ServeResult], None]) -> None:
            target = Target(url, model, timeout_s=args.timeout, **asked.how)
            sweep(target, asked.cases, asked.loads, told, goodput=asked.goodput, seed=args.seed)

        sweep_servers(points, measure, emit, timeout_s=args.start_timeout)
    else:
        if asked.loads != [Load()] or asked.goodput is not None:
            raise ConfigError("rates, concurrency and goodput are a server's: add --serve")
        sweep_offline(points, asked.cases, emit, seed=args.seed, repeat=args.repeat)
    report.print_tables()
    if args.plot is not None:
        draw_sweep(points, found, args.plot)
    return 1 if all(isinstance(result, FailedPoint) for result in found) else 0
