"""raylm serve: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
from contextlib import suppress

from raylm.cli.front import add_front
from raylm.cli.options import Subparsers, add_engine_options


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("serve", help="serve a model, or a Serve config file, over OpenAI's API")
    parser.add_argument(
        "target", metavar="TARGET", help="a Serve or engine configuration (.yaml), a model folder, .gguf or demo name"
    )
    parser.add_argument("--host", help="address to listen on (default: the configuration's, or 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: the configuration's, or 8000)")
    parser.add_argument(
        "--api-keys-file",
        type=_absolute,
        metavar="FILE",
        help="one API key a line; clients must send one of them (default: the configuration's, or nobody is asked)",
    )
    parser.add_argument(
        "--tenants-file",
        type=_absolute,
        metavar="FILE",
        help="limits and terms of the keys' tenants (.yaml): requests_per_minute, tokens_per_minute, ...",
    )
    parser.add_argument("--api-key", "--api-keys", nargs="?", action=_NoKeyHere, help=argparse.SUPPRESS)
    parser.add_argument(
        "--root-path",
        metavar="PATH",
        help="where a proxy in front shows the server, such as /llm, whether it takes that off",
    )
    add_front(parser)
    add_engine_options(parser)
    parser.add_argument(
        "--tls-certificate", "--ssl-certfile", type=_absolute, metavar="FILE", help="HTTPS instead of HTTP (PEM)"
    )
    parser.add_argument(
        "--tls-key",
        "--ssl-keyfile",
        type=_absolute,
        metavar="FILE",
        help="the certificate's key (PEM; default: in the same file)",
    )
    parser.add_argument(
        "--unix-socket",
        "--uds",
        type=_absolute,
        metavar="PATH",
        help="HTTP on a socket of this machine too, for this user's group",
    )
    parser.set_defaults(run=run, default_log_level="INFO")


class _NoKeyHere(argparse.Action):
    """vLLM's option. A key on the command line can be read by every user of the machine, so no message repeats it."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        parser.error("--api-key is not taken: write the keys into a file, one a line, and give --api-keys-file FILE")


def run(args: argparse.Namespace) -> int:
    from raylm.cli.engine_flags import given_engine
    from raylm.serving.front.install import make_folder
    from raylm.serving.front.listeners import remove_dead
    from raylm.serving.program.keeper import fork_keeper

    engine = given_engine(args)
    folder = make_folder()
    try:
        if (code := fork_keeper()) is not None:
            return code
        from raylm.serving.front.install import FrontGiven
        from raylm.serving.program.run import serve_command
        from raylm.serving.program.serve_file import HttpGiven

        serve_command(
            args.target,
            folder=folder,
            front=FrontGiven(args.front, args.tls_certificate, args.tls_key, args.unix_socket),
            host=args.host,
            port=args.port,
            given=HttpGiven(args.api_keys_file, args.tenants_file, args.root_path),
            engine=engine,
        )
        return 0
    finally:
        # By the server and by its keeper: either may be killed.
        shutil.rmtree(folder, ignore_errors=True)
        if args.unix_socket is not None:
            with suppress(OSError):
                remove_dead(args.unix_socket)


def _absolute(path: str) -> str:
    # Links stay: whoever changes the keys may do it by pointing one elsewhere.
    return os.path.abspath(os.path.expanduser(path))
