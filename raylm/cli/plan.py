"""raylm doctor --plan: what a model needs of GPUs that need not be here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.cli.options import engine_config
from raylm.errors import ConfigError

if TYPE_CHECKING:
    from raylm.config.engine import EngineConfig, ParallelConfig
    from raylm.model_files.source import ModelSource
    from raylm.models.arch import ArchConfig
    from raylm.planning.gpus import Gpu
    from raylm.planning.sizing import Plan

_USUAL_CONTEXT = 8192
_GIB = 1 << 30


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan", "what a model needs of a kind of GPU, worked out without one")
    group.add_argument("--plan", action="store_true", help="print the plan; CONFIG may be a shape of `bench shape` too")
    group.add_argument("--gpu", metavar="NAME", help="L4, L40S, A100-40, A100-80, H100, H200 or B200")
    group.add_argument("--gpus", type=_positive, metavar="N", help="GPUs in all: tensor times pipeline")
    group.add_argument(
        "--context", type=_positive, metavar="N", help=f"tokens of a request (default: {_USUAL_CONTEXT:,} or less)"
    )


def refuse_options(args: argparse.Namespace) -> None:
    """Those that mean nothing without --plan. Raises ConfigError."""
    for name in ("gpu", "gpus", "context"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for a plan; add --plan")


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 where the model does not fit. Raises ConfigError."""
    from raylm.config.resolve import resolve
    from raylm.models.load import file_scheme
    from raylm.planning.gpus import find_gpu
    from raylm.planning.sizing import Sizing

    if args.model is None or args.gpu is None:
        raise ConfigError("doctor --plan needs a MODEL and --gpu NAME")
    gpu = find_gpu(args.gpu)
    config = engine_config(args)
    arch, source = _arch(config.model.reference)
    limit = config.model.max_model_len or arch.max_position
    # A GGUF file's header says how each matrix is stored.
    stored = partial(file_scheme, source, arch) if source is not None and source.kind == "gguf" else None
    context = args.context or min(_USUAL_CONTEXT, limit)
    sizing = Sizing(resolve(config, "cuda"), arch, gpu, context=context, stored=stored)
    parallel = _parallel(args, config)
    plan, attempts = sizing.plan(parallel), sizing.attempts(parallel.pipeline)
    if args.json:
        shown = {"model": config.model.served_name, "gpu": {"name": args.gpu, **gpu._asdict()}}
        print(json.dumps({**shown, **dataclasses.asdict(plan), "attempts": attempts}))
    else:
        print(f"{config.model.served_name}, {plan.dtype}, on {plan.tensor * plan.pipeline} x {args.gpu}")
        for name, value in {**_rows(plan, config, gpu), **_attempt_rows(attempts, plan)}.items():
            print(f"  {name:<18}  {value}")
    return 0 if plan.problem is None else 1


def _arch(path: str) -> tuple[ArchConfig, ModelSource | None]:
    """The model's description, and where it is; a shape of `raylm bench shape` is nowhere. Raises ConfigError."""
    from raylm.bench.dummy import write_shape
    from raylm.bench.shapes import SHAPES, shape_named
    from raylm.model_files.source import locate
    from raylm.models.arch import ArchConfig

    if path not in SHAPES:
        try:
            source = locate(path)
            return ArchConfig.from_source(source), source
        except ConfigError as error:
            if Path(path).exists():
                raise
            if shape_named(path) is None:
                raise ConfigError(f"{error}, or a shape ({', '.join(SHAPES)})") from None
    with tempfile.TemporaryDirectory() as folder:
        return ArchConfig.from_source(locate(str(write_shape(path, Path(folder))))), None


def _parallel(args: argparse.Namespace, config: EngineConfig) -> ParallelConfig:
    """The configuration's parallel section, with the tensor ranks that --gpus leaves. Raises ConfigError."""
    from raylm.cli.engine_flags import given_engine
    from raylm.config.base import parse
    from raylm.config.engine import ParallelConfig

    pipeline = config.parallel.pipeline
    given = given_engine(args).get("parallel", {}).get("tensor")
    tensor = given or (max(1, args.gpus // pipeline) if args.gpus else config.parallel.tensor)
    if args.gpus is not None and tensor * pipeline != args.gpus:
        raise ConfigError(
            f"--gpus is {args.gpus}, but tensor {tensor} times pipeline {pipeline} is {tensor * pipeline}"
        )
    return parse(ParallelConfig, config.parallel.model_dump() | {"tensor": tensor}, source="doctor --plan")


def _rows(plan: Plan, config: EngineConfig, gpu: Gpu) -> dict[str, str]:
    utilization = config.cache.gpu_memory_utilization
    taken = (
        f"{plan.table_bytes / _GIB:.1f} GiB for the request table and (estimates) {plan.step_bytes / _GIB:.1f} for the "
        f"largest step and {plan.cuda_bytes / _GIB:.1f} for CUDA"
    )
    if plan.problem is not None:
        return {**_needs(plan), "does not fit": plan.problem}
    rows = {
        **_needs(plan),
        "memory of a GPU": f"{plan.memory_bytes / _GIB:.1f} GiB ({utilization:g} of {gpu.memory_gib:g}), less {taken}",
        "left for the cache": f"{plan.cache_bytes / _GIB:.1f} GiB, {plan.cache_tokens:,} tokens",
        "concurrency": f"{plan.concurrency:.1f} requests of {plan.context:,} tokens",
        "decode, at most": f"{plan.decode_tokens_s:,.0f} tokens/s for one request; {plan.batch_tokens_s:,.0f} for "
        f"{plan.batch} of {plan.context:,} tokens (bandwidth {gpu.bandwidth_gb_s:,g} GB/s a GPU)",
    }
    if plan.prefill_tokens_s is not None:
        rates = f"{gpu.bf16_tflops:,g} TFLOP/s a GPU"
        if plan.in_8_bits:
            rates += f", {gpu.fp8_tflops:,g} in 8 bits"
        rows["prefill, at most"] = f"{plan.prefill_tokens_s:,.0f} tokens/s ({rates})"
    return rows


def _needs(plan: Plan) -> dict[str, str]:
    decoded = ""
    parts = {"linear layers": plan.kept_as, "experts": plan.experts_kept_as}
    if kept := [f"{part} in {form}" for part, form in parts.items() if form is not None]:
        stored = f", as stored: {plan.quantisation}; all others in {plan.dtype}" if plan.quantisation else ""
        decoded = f" ({', '.join(kept)}{stored})"
    elif plan.quantisation is not None:
        decoded = f" (stored as {plan.quantisation}, decoded to {plan.dtype})"
    cache = "" if plan.cache_dtype == plan.dtype else f" ({plan.cache_dtype})"
    return {
        "parallel": f"tensor {plan.tensor}, pipeline {plan.pipeline}",
        "weights": f"{plan.weight_bytes / 1e9:.2f} GB in all, {plan.weight_bytes_gpu / 1e9:.2f} GB a GPU{decoded}",
        "KV cache": f"{plan.kv_bytes_token:,} bytes a token in all, {plan.kv_bytes_token_gpu:,} a GPU{cache}",
    }


def _attempt_rows(attempts: dict[int, str | None], plan: Plan) -> dict[str, str]:
    others = {tensor: reason for tensor, reason in attempts.items() if reason is None or tensor != plan.tensor}
    return {f"tensor {tensor}": reason or "is the smallest that fits" for tensor, reason in others.items()}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
