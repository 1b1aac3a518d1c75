"""raylm front: the program in front of HAProxy, for clusters that `raylm serve` does not start."""

from __future__ import annotations

import argparse
from pathlib import Path

from raylm.cli.options import Subparsers


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "front",
        help="write the program that Serve is to start as HAProxy: with limits, and again when it dies",
        description="Write PROGRAM, which RAY_SERVE_HAPROXY_BINARY_PATH is to name in the environment of `ray start`.",
    )
    parser.add_argument("program", metavar="PROGRAM", type=Path)
    add_front(parser)
    parser.set_defaults(run=run)


def add_front(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--front",
        metavar="FILE",
        help="limits on connections, TLS (.yaml): header_timeout_s, max_connections, tls, ...",
    )


def run(args: argparse.Namespace) -> int:
    from raylm.serving.front.install import FrontGiven, write_program

    write_program(args.program, FrontGiven(args.front).config())
    return 0
