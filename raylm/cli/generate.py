"""raylm generate: complete prompts in this process."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from raylm.cli.options import Subparsers, add_engine_options, add_model, add_sampling_options

if TYPE_CHECKING:
    from raylm.llm import Completion

_MAX_TOKENS = 128


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("generate", help="complete prompts offline")
    add_model(parser)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text to go on from; - reads it from stdin")
    parser.add_argument("--json", action="store_true", help="print one JSON line a completion")
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from raylm.cli.options import engine_config, sampling_params
    from raylm.llm import LLM

    config = engine_config(args)
    params = sampling_params(args, config, max_tokens=_MAX_TOKENS)
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]
    progress = sys.stderr.isatty()
    llm = LLM(config, progress=progress)
    try:
        completions = llm.generate(prompts, params, progress=progress)
    finally:
        llm.close()
    for completion in completions:
        _print(completion, as_json=args.json, with_prompt=len(prompts) > 1)
    return 0


def _print(completion: Completion, *, as_json: bool, with_prompt: bool) -> None:
    for index, output in enumerate(completion.outputs):
        if as_json:
            row = {
                "prompt": completion.prompt,
                "index": index,
                "text": output.text,
                "finish_reason": output.finish_reason,
                "prompt_tokens": len(completion.prompt_token_ids),
                "output_tokens": len(output.token_ids),
            }
            print(json.dumps(row))
        else:
            print(f"{completion.prompt}{output.text}" if with_prompt else output.text)
