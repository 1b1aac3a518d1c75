"""raylm convert: a checkpoint written once more, quantised or decoded."""

from __future__ import annotations

import argparse
from pathlib import Path

from raylm.cli.options import Subparsers
from raylm.errors import ConfigError

_METHODS = ("fp8", "int8", "int4", "none")
_DTYPES = ("bfloat16", "float16", "float32")
_GROUP_SIZE = 128


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("convert", help="write a model once more, quantised or decoded")
    parser.add_argument("model", metavar="MODEL", help="a folder with safetensors, or a model of the hub (owner/name)")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder, which appears whole or not at all")
    parser.add_argument(
        "--quantization",
        required=True,
        choices=_METHODS,
        help="of linear layers: fp8 and int8 have a scale a row, int4 one a group; none decodes a quantised model",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        metavar="N",
        help=f"int4: columns that share a scale, 32, 64 or 128 (default: {_GROUP_SIZE})",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of what is not quantised (default: the model's own)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was written. Raises ConfigError."""
    if args.group_size is not None and args.quantization != "int4":
        raise ConfigError(f"--group-size is for --quantization int4, not {args.quantization}")
    import torch

    from raylm.model_files.source import locate
    from raylm.models.convert import convert

    found = convert(
        locate(args.model, field="MODEL"),
        args.out.expanduser(),
        None if args.quantization == "none" else args.quantization,
        group_size=args.group_size or _GROUP_SIZE,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
    )
    read, written = found.read_bytes / 1e9, found.written_bytes / 1e9
    what = f"{found.num_quantised} matrices in {args.quantization}, " if found.num_quantised else ""
    print(
        f"{args.out}: {what}{found.num_kept} tensors not quantised; {read:.2f} GB became {written:.2f} GB in "
        f"{found.seconds:.1f} s ({found.read_bytes / 1e6 / max(found.seconds, 1e-9):.0f} MB/s read)"
    )
    return 0
