"""raylm bench serve: what is asked of a server, and when."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raylm.cli.options import add_api_key, add_ca, api_key, positive, trusted
from raylm.errors import ConfigError

if TYPE_CHECKING:
    from raylm.bench.cases import Case, Dataset, Lengths
    from raylm.bench.report import Result
    from raylm.bench.serve import Goodput, Load
    from raylm.sim.arrivals import Ramp

_CASE_HELP = (
    "name:requests:input_len:output_len, where output_len may be a range such as 8-128, and input_len a sum such as "
    "2048+512, of which the first part is the same in all prompts; repeatable"
)
_DATASETS = ("random", "sharegpt", "prefix", "multi-turn")
# What a dataset is made by, and what it is where the command line does not say.
_SHAPE = {
    "requests": 64,
    "groups": 8,
    "prefix_len": 512,
    "input_len": "128",
    "output_len": "64",
    "turns": "2-6",
    "think_s": 0.0,
}
_TAKEN = {
    "sharegpt": {"dataset_path", "requests", "turns"},
    "prefix": {"requests", "groups", "prefix_len", "input_len", "output_len"},
    "multi-turn": set(_SHAPE),
}


def add_serve(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the API's address (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that is listed)")
    add_api_key(parser)
    add_ca(parser)
    add_requests(parser)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (%(default)s)")
    add_report(parser)
    parser.set_defaults(run=run, measure=measure)


def add_requests(parser: argparse.ArgumentParser) -> None:
    """What is asked, and when."""
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    add_cases(parser, help=f"{', '.join(_DATASETS)}, or a file of JSON lines with prompts")
    _add_shape(parser.add_argument_group("datasets"))
    _add_load(parser.add_argument_group("load"))
    parser.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits, as in ttft:200 itl:50")
    parser.add_argument(
        "--vocab-size", type=positive, default=32000, help="random prompts use token ids below this (%(default)s)"
    )
    parser.add_argument("--no-ignore-eos", action="store_true", help="for servers that do not know ignore_eos")


def _add_shape(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-path", metavar="FILE", help="sharegpt: the JSON file")
    group.add_argument("--requests", type=positive, metavar="N", help="requests, or conversations (64)")
    group.add_argument("--groups", type=positive, metavar="N", help="system prompts that requests share (8)")
    group.add_argument("--prefix-len", type=positive, metavar="N", help="words of a system prompt (512)")
    group.add_argument("--input-len", metavar="N[-M]", help="words of a message (128)")
    group.add_argument("--output-len", metavar="N[-M]", help="tokens of an answer (64)")
    group.add_argument("--turns", metavar="N[-M]", help="exchanges of a conversation (2-6; sharegpt: at most N, 1)")
    group.add_argument("--think-s", type=float, metavar="S", help="mean seconds from an answer to the next turn (0)")
    group.add_argument("--session-header", metavar="NAME", help="send the conversation's name in this header")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate", type=_rates, default=[math.inf], metavar="R[,R...]", help="requests/s (Poisson), or inf"
    )
    group.add_argument(
        "--ramp-up",
        type=_ramp,
        metavar="A:B[:KIND]",
        help="in place of a rate: from A to B requests/s over the run; KIND is linear (default) or exponential",
    )
    group.add_argument(
        "--burstiness",
        type=_burstiness,
        default=1.0,
        metavar="K",
        help="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier (%(default)g)",
    )
    group.add_argument(
        "--concurrency", type=_counts, default=[None], metavar="N[,N...]", help="requests at a time at most"
    )


def add_cases(parser: argparse.ArgumentParser, *, help: str = "random, or JSON lines with prompts") -> None:
    parser.add_argument("--case", action="append", default=[], metavar="CASE", help=_CASE_HELP)
    parser.add_argument("--dataset", default="random", metavar="NAME", help=help)
    parser.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (%(default)s)")


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON lines here too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results (.png, .svg or .pdf)")


def measure(args: argparse.Namespace, emit: Callable[[Result], None]) -> None:
    from raylm.bench.serve import Target, sweep
    from raylm.cli.server import connect, first_model

    asked = requests_of(args)
    key = api_key(args)
    context = trusted(args)
    with connect(args.url, api_key=key, verify=context) as http:
        model = args.model or first_model(http)
    target = Target(args.url, model, api_key=key, trusted=context, timeout_s=args.timeout, **asked.how)
    sweep(target, asked.cases, asked.loads, emit, goodput=asked.goodput, seed=args.seed)


class Requests(NamedTuple):
    """What the options of add_requests say. `how`: fields of Target."""

    cases: list[Case | Dataset]
    loads: list[Load]
    goodput: Goodput | None
    how: dict[str, Any]


def requests_of(args: argparse.Namespace) -> Requests:
    """Raises ConfigError."""
    from raylm.bench.serve import Goodput, Load

    found = served_cases(args)
    rates: list[float | Ramp | None] = [None if math.isinf(rate) else rate for rate in args.request_rate]
    if args.ramp_up is not None:
        if rates != [None]:
            raise ConfigError("--ramp-up is a rate already: leave out --request-rate")
        rates = [args.ramp_up]
    if rates == [None] and args.burstiness != 1:
        raise ConfigError("--burstiness spreads requests over time: it needs --request-rate or --ramp-up")
    loads = [Load(concurrency, rate, args.burstiness) for rate in rates for concurrency in args.concurrency]
    how = {
        "endpoint": args.endpoint,
        "vocab_size": args.vocab_size,
        "ignore_eos": not args.no_ignore_eos,
        "session_header": args.session_header,
    }
    return Requests(found, loads, Goodput.parse(args.goodput), how)


def served_cases(args: argparse.Namespace, default: str = "load:64:128:64") -> list[Case | Dataset]:
    """Raises ConfigError, naming an option that the dataset does not take."""
    from raylm.bench.datasets import Shape, multi_turn_dataset, prefix_dataset, sharegpt_dataset

    given = {name for name in ("dataset_path", *_SHAPE) if getattr(args, name) is not None}
    taken = _TAKEN.get(args.dataset, set())
    if wrong := sorted(given - taken):
        raise ConfigError(f"--{wrong[0].replace('_', '-')} says nothing of --dataset {args.dataset}")
    if args.dataset not in _TAKEN:
        return cases(args, default)
    if args.case:
        raise ConfigError("--dataset brings its own requests: leave out --case")
    if args.dataset == "sharegpt":
        if args.dataset_path is None:
            raise ConfigError("--dataset sharegpt needs --dataset-path FILE, the JSON file")
        turns = positive(args.turns or "1")
        found = sharegpt_dataset(args.dataset_path, requests=args.requests or 1000, turns=turns, seed=args.seed)
        return [found]
    told = {**_SHAPE, **{name: getattr(args, name) for name in given}}
    if told["think_s"] < 0:
        raise ConfigError(f"--think-s {told['think_s']:g} must be at least 0")
    single = args.dataset == "prefix"
    shape = Shape(
        told["requests"],
        told["groups"],
        told["prefix_len"],
        _lengths("--input-len", told["input_len"]),
        _lengths("--output-len", told["output_len"]),
        _lengths("--turns", "1" if single else told["turns"]),
        told["think_s"],
    )
    return [(prefix_dataset if single else multi_turn_dataset)(shape, args.seed)]


def cases(args: argparse.Namespace, default: str) -> list[Case | Dataset]:
    """Random cases, or those of a file. Raises ConfigError."""
    from raylm.bench.cases import load_dataset, parse_case

    if args.dataset == "random":
        return [parse_case(text) for text in args.case or [default]]
    if args.case:
        raise ConfigError("--dataset brings its own requests: leave out --case")
    return [load_dataset(args.dataset)]


def _lengths(option: str, text: str) -> Lengths:
    from raylm.bench.cases import Lengths

    low, dash, high = text.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise ConfigError(f"{option} {text!r} must be a number of at least 1, or a rising range such as 8-128")
    return Lengths(int(low), int(high or low))


def _counts(text: str) -> list[int | None]:
    return [positive(part) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    rates = [float(part) for part in text.split(",")]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"rates must be over 0 requests/s or inf, got {text}")
    return rates


def _ramp(text: str) -> Ramp:
    from raylm.sim.arrivals import Ramp

    start, _, rest = text.partition(":")
    end, _, growth = rest.partition(":")
    try:
        rates = float(start), float(end)
    except ValueError:
        rates = (0.0, 0.0)
    if not all(0 < rate < math.inf for rate in rates) or growth not in ("", "linear", "exponential"):
        raise argparse.ArgumentTypeError(f"must be rates over 0, as in 1:20 or 1:20:exponential, got {text}")
    return Ramp(*rates, growth or "linear")  # type: ignore[arg-type]


def _burstiness(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be over 0, got {text}")
    return value
