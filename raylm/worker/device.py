"""The device of a worker: which one, and the type that its weights and activations have on it."""

from __future__ import annotations

import os

import torch

from raylm.config.resolve import ResolvedEngine
from raylm.errors import ConfigError
from raylm.log import get_logger
from raylm.ops import CODES, extension
from raylm.parallel.groups import Seat

logger = get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(wanted: str) -> torch.device:
    """The device to run on: auto takes a GPU where there is one. Raises ConfigError."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device 'cuda' was asked for, but torch sees no CUDA device here; allowed: auto, cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def device_of_seat(wanted: str, seat: Seat | None) -> torch.device:
    """As choose_device; a worker that shares the model with others has the GPU of its seat. Raises ConfigError."""
    device = choose_device(wanted)
    if seat is not None and device.type == "cuda":
        return torch.device("cuda", seat.gpu)
    return device


def prepare_device(config: ResolvedEngine, device: torch.device) -> None:
    """Start CUDA, or set the number of threads of a CPU; log which kernels an extension of older sources lacks. Raises
    ConfigError where the extension has none for the GPU."""
    if outdated := extension.load().outdated(device.type):
        logger.warning("%s", outdated)
    if device.type == "cpu":
        torch.set_num_threads(config.runtime.num_threads or max(cores_of_worker(config), 1))
        return
    torch.cuda.init()
    if device.index is not None:
        torch.cuda.set_device(device)
    if misfit := extension.load().misfit(torch.cuda.get_device_capability(device)):
        raise ConfigError(misfit)


def cores_of_worker(config: ResolvedEngine) -> int:
    """A worker's share of this process's cores; 0 where there are more workers than cores."""
    return len(os.sched_getaffinity(0)) // config.parallel.num_workers


def choose_cache_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """What the KV cache holds: auto is the type of weights and activations."""
    return CODES if wanted == "fp8" else dtype


def choose_dtype(wanted: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The type of weights and activations: auto is float32 on a CPU; on a GPU the checkpoint's, at 16 bits."""
    if wanted != "auto":
        return _DTYPES[wanted]
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if checkpoint == "float16" else torch.bfloat16
