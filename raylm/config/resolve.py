"""A configuration once the device is known: what by default depends on the device is a number here."""

from __future__ import annotations

from typing import Literal, NamedTuple

from raylm.config.base import parse
from raylm.config.engine import EngineConfig, NumBatchedTokens, NumSeqs, RuntimeConfig, SchedulerConfig, Seconds

DeviceKind = Literal["cpu", "cuda"]


class ResolvedScheduler(SchedulerConfig):
    """What the scheduler and the workers are given."""

    max_num_seqs: NumSeqs
    max_num_batched_tokens: NumBatchedTokens


class ResolvedRuntime(RuntimeConfig):
    """What the executor and the workers are given."""

    step_timeout_s: Seconds


class ResolvedEngine(EngineConfig):
    """What an engine, its executor and its workers are given."""

    scheduler: ResolvedScheduler
    runtime: ResolvedRuntime


FOLLOWED_PREFILL_CHUNK = 512
"""With so many tokens a GPU's step is bound by arithmetic, no longer by the reading of weights: more of them would save
little, and every running request would wait for them."""


class _Defaults(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int
    step_timeout_s: float


_DEFAULTS: dict[DeviceKind, _Defaults] = {
    # A long prompt takes a CPU tens of seconds a step.
    "cpu": _Defaults(64, 2048, step_timeout_s=60.0),
    # A GPU reads its weights for a whole batch, so a larger one costs little: of 128 to 1,024 rows 1,024 measured best
    # on an H200, with two dense models and a mixture (docs/performance.md). A step of 8,192 tokens fills it, and takes
    # a second or two with the largest models.
    "cuda": _Defaults(1024, 8192, step_timeout_s=10.0),
}


def followed(config: EngineConfig) -> EngineConfig:
    """The configuration of an engine whose answers are followed token by token."""
    if config.scheduler.prefill_chunk is not None:
        return config
    scheduler = config.scheduler.model_copy(update={"prefill_chunk": FOLLOWED_PREFILL_CHUNK})
    return config.model_copy(update={"scheduler": scheduler})


def resolve(config: EngineConfig, device: DeviceKind) -> ResolvedEngine:
    """The configuration for a device, with its defaults filled in. Where the rows or the tokens of a step are given,
    the default of the other goes with them.

    Raises ConfigError when a value does not go with the device.
    """
    data = config.model_dump()
    data["runtime"]["device"] = device
    defaults = _DEFAULTS[device]
    rows, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    data["scheduler"] |= {
        "max_num_seqs": rows or min(defaults.max_num_seqs, tokens or defaults.max_num_batched_tokens),
        "max_num_batched_tokens": tokens or max(defaults.max_num_batched_tokens, rows or 0),
    }
    data["runtime"]["step_timeout_s"] = config.runtime.step_timeout_s or defaults.step_timeout_s
    return parse(ResolvedEngine, data, source=config.model.served_name)
