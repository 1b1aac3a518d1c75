"""raylm bench: throughput, latency, speculation, structure, serve, startup, scheduler, trace, experts, shape ..."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.bench.shapes import QUANTISED, SHAPES
from raylm.cli.bench_autoscaling import add_autoscaling
from raylm.cli.bench_routing import add_routing
from raylm.cli.bench_serve import add_cases, add_report, add_serve
from raylm.cli.bench_serve import cases as cases_of
from raylm.cli.bench_sweep import add_sweep
from raylm.cli.options import Subparsers, add_api_key, add_engine_options, add_model, api_key, engine_config, positive
from raylm.errors import ConfigError

if TYPE_CHECKING:
    from raylm.bench.cases import Case, Dataset
    from raylm.bench.report import Result
    from raylm.llm import LLM

    Emit = Callable[[Result], None]


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("bench", help="measure throughput, latency, a server under load, or start-up")
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for mode, text in (("throughput", "a case as one batch, offline"), ("latency", "requests one by one, offline")):
        _add_offline(kinds.add_parser(mode, help=text), mode)
    _add_speculation(kinds.add_parser("speculation", help="plain against speculative decoding, offline, in turns"))
    _add_structure(kinds.add_parser("structure", help="JSON schemas against plain sampling, offline, in turns"))
    add_serve(kinds.add_parser("serve", help="load on any OpenAI-compatible server"), run)
    add_sweep(kinds.add_parser("sweep", help="the same load under many settings of the engine"))
    _add_startup(kinds.add_parser("startup", help="from starting a process to its first answer"))
    _add_scheduler(kinds.add_parser("scheduler", help="the scheduler's own time for a step; needs no model"))
    add_routing(kinds.add_parser("routing", help="what a choice of engine costs, and policies on a simulated cluster"))
    add_autoscaling(kinds.add_parser("autoscaling", help="replicas that a changing load brings, on a simulated clock"))
    _add_steps(kinds.add_parser("steps", help="plans to workers and results back, without a model"))
    _add_trace(kinds.add_parser("trace", help="what a GPU does in a step, and how much of the time it waits"))
    _add_experts(kinds.add_parser("experts", help="how many experts of a mixture a decode step goes to"))
    _add_all_reduce(kinds.add_parser("all-reduce", help="sums over this host's GPUs, by size and by way"))
    _add_shape(kinds.add_parser("shape", help="write the shape of a public model, to measure with random weights"))


def _add_offline(parser: argparse.ArgumentParser, mode: str) -> None:
    add_model(parser)
    add_cases(parser)
    parser.add_argument("--repeat", type=positive, default=1, metavar="N", help="measure N times, report the median")
    parser.add_argument(
        "--compare", choices=("transformers",), help="run the same cases with this too, in turns, on the same weights"
    )
    add_engine_options(parser)
    add_report(parser)
    parser.add_argument(
        "--sampling",
        action="append",
        default=[],
        metavar="JSON",
        help='fields of SamplingParams, such as {"temperature": 0.8}; repeatable: they take turns. Greedy by default',
    )
    parser.set_defaults(run=run, measure=_offline, mode=mode)


def _add_speculation(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--method",
        choices=("ngram", "suffix", "draft_model", "eagle3", "mtp"),
        default="ngram",
        help="who drafts (%(default)s); the last three draft on the device, beside a second, plain engine",
    )
    parser.add_argument("--draft-model", metavar="PATH", help="the draft model, or the head of eagle3")
    parser.add_argument("--replay", type=float, metavar="P", help="draft the plain output, each token right with P")
    parser.add_argument(
        "--num-drafts", type=positive, default=7, metavar="N", help="drafts a row at most (%(default)s)"
    )
    parser.add_argument(
        "--kind", action="append", default=[], metavar="KIND", help="copy, extract, edit, chat or random; repeatable"
    )
    parser.add_argument("--streams", type=_batches, default=[1, 16], metavar="N[,N...]", help="requests at a time")
    parser.add_argument("--requests", type=positive, metavar="N", help="of a kind (default: all of the set)")
    parser.add_argument("--max-tokens", type=positive, default=200, metavar="N", help="of an output (%(default)s)")
    add_engine_options(parser)
    add_report(parser)
    parser.set_defaults(run=run, measure=_speculation, draws=True)


def _add_structure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--schemas", type=positive, default=200, metavar="N", help="a request each (%(default)s)")
    parser.add_argument("--streams", type=positive, default=64, metavar="N", help="requests at a time (%(default)s)")
    parser.add_argument("--prompt-len", type=positive, default=32, metavar="N", help="of a request (%(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="of an output (%(default)s)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="runs; medians are told (%(default)s)")
    add_engine_options(parser)
    add_report(parser)
    parser.set_defaults(run=run, measure=_structure, draws=True)


def _add_startup(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=False)
    parser.add_argument("--serve", metavar="TARGET", help="start `raylm serve TARGET` instead of loading MODEL")
    add_api_key(parser)
    parser.add_argument("--repeat", type=positive, default=1, metavar="N", help="one line each")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one start (%(default)s)")
    add_engine_options(parser)
    add_report(parser)
    parser.set_defaults(run=run, measure=_startup)


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=_sizes, default=[64, 256, 1024], metavar="N[,N...]", help="decoding requests")
    parser.add_argument("--waiting", type=_sizes, default=[0, 10000], metavar="N[,N...]", help="requests in the queue")
    parser.add_argument("--prompt-len", type=positive, default=32768, metavar="N", help="of the prefix looked up")
    parser.add_argument("--steps", type=positive, default=300, metavar="N", help="steps to measure (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON lines here too")
    parser.set_defaults(run=run, measure=_scheduler, plot=None)


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=_batches, default=[1, 2, 4, 8], metavar="N[,N...]", help="processes")
    parser.add_argument(
        "--device-us", type=positive, default=3000, metavar="N", help="what a step takes a device (%(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=500, metavar="N", help="steps to measure (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON lines here too")
    parser.set_defaults(run=run, measure=_steps, plot=None)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--batch", type=_batches, default=[1, 64], metavar="N[,N...]", help="requests at a time")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="decode steps to look at (%(default)s)")
    parser.add_argument("--prompt-len", type=positive, default=128, metavar="N", help="of a request (%(default)s)")
    parser.add_argument("--prefill", action="store_true", help="look at the steps of the prompts instead")
    add_engine_options(parser)
    add_report(parser)
    parser.set_defaults(run=run, measure=_trace, draws=True)


def _add_experts(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--batch", type=_batches, default=[1, 32, 256], metavar="N[,N...]", help="requests at a time")
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="decode steps to look at (%(default)s)")
    parser.add_argument("--prompt-len", type=positive, default=128, metavar="N", help="of a request (%(default)s)")
    add_engine_options(parser)
    add_report(parser)
    parser.set_defaults(run=run, measure=_experts)


def _add_all_reduce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, metavar="N", help="GPUs (default: all, up to 8)")
    parser.add_argument("--sizes", type=_batches, metavar="N[,N...]", help="bytes (default: 4 KiB to 8 MiB, doubling)")
    parser.add_argument(
        "--rows", type=_batches, metavar="N[,N...]", help="of 4,096, with a norm; of logits (1 to 8,192)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON lines here too")
    parser.set_defaults(run=run, measure=_all_reduce, plot=None)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to write config.json and a tokenizer")
    parser.add_argument("--quantised", choices=list(QUANTISED), help="of a checkpoint in this format")
    parser.set_defaults(run=_shape)


def run(args: argparse.Namespace) -> int:
    from raylm.bench.plot import check_plot, draw
    from raylm.bench.report import Report

    if args.plot is not None:
        check_plot(args.plot)
    report = Report(args.output)
    args.measure(args, report.add)
    report.print_tables()
    if args.plot is not None and not getattr(args, "draws", False):
        draw(report.results, args.plot)
    return 0


def _offline(args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.offline import DEFAULT_CASES, run_case, run_in_turns

    cases = cases_of(args, DEFAULT_CASES[args.mode])
    if args.dataset != "random" and args.repeat > 1:
        raise ConfigError("--repeat with --dataset would find the prompts in the prefix cache; leave one of them out")
    from raylm.llm import LLM

    llm = LLM(engine_config(args))
    try:
        if args.compare is not None:
            _compare(llm, cases, args, emit)
            return
        for case in cases:
            if args.sampling:
                for result in run_in_turns(llm, case, args.mode, args.sampling, seed=args.seed, repeat=args.repeat):
                    emit(result)
            else:
                emit(run_case(llm, case, args.mode, seed=args.seed, repeat=args.repeat))
    finally:
        llm.close()


def _speculation(args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.speculation import KINDS, Settings, measure_speculation
    from raylm.config.base import parse
    from raylm.config.engine import EngineConfig

    kinds = args.kind or (["random"] if args.replay is not None else list(KINDS[:-1]))
    if unknown := set(kinds) - set(KINDS):
        raise ConfigError(f"--kind {min(unknown)!r} must be one of {', '.join(KINDS)}")
    if args.replay is not None and not 0 <= args.replay <= 1:
        raise ConfigError(f"--replay {args.replay:g} must be a probability from 0 to 1")
    config = engine_config(args)
    speculation = {"method": args.method, "num_drafts": args.num_drafts, "model": args.draft_model}
    config = parse(EngineConfig, {**config.model_dump(), "speculation": speculation}, source="raylm bench speculation")
    settings = Settings(kinds, args.streams, args.requests, args.max_tokens, args.replay)
    for result in measure_speculation(config, settings):
        emit(result)


def _structure(args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.structure import measure_structure

    result = measure_structure(
        engine_config(args),
        schemas=args.schemas,
        streams=args.streams,
        input_len=args.prompt_len,
        max_tokens=args.max_tokens,
        repeat=args.repeat,
    )
    emit(result)


def _compare(llm: LLM, cases: list[Case | Dataset], args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.compare import compare_case, load_reference
    from raylm.model_files.source import locate

    source = locate(llm.config.model.reference)
    model = load_reference(source, dtype=llm.info.dtype, device=llm.info.device)
    for case in cases:
        for result in compare_case(llm, model, case, args.mode, seed=args.seed, repeat=args.repeat):
            emit(result)


def _startup(args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.startup import measure_offline, measure_server

    if (args.model is None) == (args.serve is None):
        raise ConfigError("bench startup needs a MODEL, or --serve with what to serve, and not both")
    for _ in range(args.repeat):
        if args.serve is not None:
            emit(measure_server(args.serve, timeout_s=args.timeout, api_key=api_key(args)))
        else:
            emit(measure_offline(engine_config(args), timeout_s=args.timeout))


def _scheduler(args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.scheduler import measure_prefix, measure_steps

    for running in args.running:
        for waiting in args.waiting:
            emit(measure_steps(running, waiting, steps=args.steps))
    emit(measure_prefix(args.prompt_len))


def _steps(args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.steps import measure_steps_channel

    for workers in args.workers:
        for result in measure_steps_channel(workers, device_us=args.device_us, steps=args.steps):
            emit(result)


def _trace(args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.trace import Work, draw_trace, trace_steps

    found = trace_steps(engine_config(args), args.batch, Work(args.steps, args.prompt_len, args.prefill))
    for traced in found:
        emit(traced.result)
        for kind in traced.kinds:
            emit(kind)
    if args.plot is not None:
        draw_trace(found, args.plot)


def _experts(args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.experts import experts_touched
    from raylm.bench.trace import Work

    for result in experts_touched(engine_config(args), args.batch, Work(args.steps, args.prompt_len)):
        emit(result)


def _all_reduce(args: argparse.Namespace, emit: Emit) -> None:
    from raylm.bench.all_reduce import DEFAULT_ROWS, DEFAULT_SIZES, measure_all_reduce

    for result in measure_all_reduce(args.ranks, args.sizes or DEFAULT_SIZES, args.rows or DEFAULT_ROWS):
        emit(result)


def _shape(args: argparse.Namespace) -> int:
    from raylm.bench.dummy import write_shape

    print(write_shape(args.name, args.folder, quantised=args.quantised))
    return 0


def _batches(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return sizes
