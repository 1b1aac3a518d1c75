"""raylm batch: a file of requests on a Ray cluster. `python -m raylm.batch` is the same command, for jobs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING

from raylm.cli.options import MODEL_HELP, Subparsers, add_engine_options, engine_config, positive
from raylm.errors import ConfigError

if TYPE_CHECKING:
    from raylm.batch.job import BatchSettings, Summary


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("batch", help="answer a file of requests on a Ray cluster, resumable")
    parser.add_argument(
        "--input", required=True, metavar="FILE", help=".jsonl, .txt or .parquet; a path, folder, glob or fsspec URL"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help=".jsonl or .parquet; a path or fsspec URL")
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--engines", type=positive, metavar="N", help="by default as many as the cluster has room for now"
    )
    parser.add_argument(
        "--shard-size", type=positive, default=128, metavar="N", help="requests checkpointed together (%(default)s)"
    )
    parser.add_argument(
        "--keep-order",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="results in the order of the input, or as they come within a shard",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=128, metavar="N", help="for plain prompts that say nothing (%(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="drop an output, or work on it, that is there")
    parser.add_argument(
        "--address", metavar="ADDRESS", help="of a Ray cluster (default: the one whose job this is, or one of its own)"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    add_engine_options(parser)
    parser.set_defaults(run=run, default_log_level="INFO")


def run(args: argparse.Namespace) -> int:
    from raylm.batch.cluster import is_local
    from raylm.serving.program.keeper import fork_keeper

    # A cluster of the command's own must end with it, also by kill -9; and a fork comes before any thread.
    if is_local(args.address) and (code := fork_keeper()) is not None:
        return code
    settings = _settings(args)
    from raylm.batch.job import on_cluster, run_batch

    try:
        summary = run_batch(settings, on_cluster(args.address))
    except KeyboardInterrupt:
        print("raylm: interrupted; the same command goes on from here", file=sys.stderr, flush=True)
        return 130
    print(_sentence(summary, args.output), flush=True)
    return 0


def _settings(args: argparse.Namespace) -> BatchSettings:
    """Everything that can be checked before a cluster is started. Raises ConfigError."""
    for package in ("pyarrow", "fsspec"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"batches need the package {package}: in raylm's repository, pip install -e '.[batch]'")
    if not args.output.endswith((".jsonl", ".parquet")):
        raise ConfigError(f"--output {args.output!r} must end with .jsonl or .parquet")
    from raylm.batch.check import check_model
    from raylm.batch.cluster import is_local
    from raylm.batch.files import Place
    from raylm.batch.job import BatchSettings

    Place(args.input).inputs()
    config = check_model(engine_config(args), must_be_here=is_local(args.address))
    return BatchSettings(
        input=args.input,
        output=args.output,
        config=config,
        engines=args.engines,
        shard_size=args.shard_size,
        keep_order=args.keep_order,
        max_tokens=args.max_tokens,
        overwrite=args.overwrite,
        progress=not args.no_progress,
    )


def _sentence(summary: Summary, output: str) -> str:
    totals = summary.totals
    parts = [f"{output}: {totals.lines} results, {totals.errors} of them errors"]
    parts.append(f"{totals.prompt_tokens} prompt and {totals.completion_tokens} completion tokens")
    if summary.resumed:
        parts.append(f"{summary.resumed} lines were done before")
    if summary.seconds:
        parts.append(f"{summary.tokens_per_s:.1f} tokens/s over {summary.seconds:.1f} s")
    return "; ".join(parts)
