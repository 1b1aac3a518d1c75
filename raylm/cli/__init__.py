"""The command `raylm`. Nothing heavy is imported until a subcommand runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import raylm
from raylm.cli import batch, bench, chat, convert, doctor, front, generate, serve, simulate, top
from raylm.cli.options import LateParser
from raylm.errors import RaylmError
from raylm.log import configure

_COMMANDS = (serve, generate, chat, top, batch, bench, simulate, convert, doctor, front)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. An error of the user's making is one line on stderr and exit code 2."""
    args = make_parser().parse_args([dashed(word) for word in (sys.argv[1:] if argv is None else argv)])
    configure(args.log_level or getattr(args, "default_log_level", "WARNING"))
    try:
        code: int = args.run(args)
        return code
    except RaylmError as error:
        print(f"raylm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def dashed(word: str) -> str:
    """An option written with underscores (--max_model_len), which vLLM takes too, with dashes."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def make_parser() -> argparse.ArgumentParser:
    parser = LateParser(prog="raylm", description="LLM serving native to Ray.")
    parser.add_argument("--version", action="version", version=f"raylm {raylm.__version__}")
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    parser.add_argument("--log-level", choices=levels, help="of raylm's log lines on stderr")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser
