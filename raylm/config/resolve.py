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


class _SchedulerDefaults(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int


class _RuntimeDefaults(NamedTuple):
    step_timeout_s: float


class _Defaults(NamedTuple):
    scheduler: _SchedulerDefaults
    runtime: _RuntimeDefaults


_DEFAULTS: dict[DeviceKind, _Defaults] = {
    # A long prompt takes a CPU tens of seconds a step.
    "cpu": _Defaults(_SchedulerDefaults(64, 2048), _RuntimeDefaults(60.0)),
    # A GPU reads its weights for a whole batch, so a larger one costs little; a step of 8,192 tokens fills it, and
    # takes a second or two with the largest models.
    "cuda": _Defaults(_SchedulerDefaults(256, 8192), _RuntimeDefaults(10.0)),
}


def followed(config: EngineConfig) -> EngineConfig:
    """The configuration of an engine whose answers are followed token by token."""
    if config.scheduler.prefill_chunk is not None:
        return config
    scheduler = config.scheduler.model_copy(update={"prefill_chunk": FOLLOWED_PREFILL_CHUNK})
    return config.model_copy(update={"scheduler": scheduler})


def resolve(config: EngineConfig, device: DeviceKind) -> ResolvedEngine:
    """The configuration for a device, with its defaults filled in.

    Raises ConfigError when a value does not go with the default of another.
    """
    data = config.model_dump()
    data["runtime"]["device"] = device
    filled: dict[str, float] = {}
    for section, defaults in _DEFAULTS[device]._asdict().items():
        missing = {key: value for key, value in defaults._asdict().items() if data[section][key] is None}
        data[section] |= missing
        filled |= missing
    source = config.model.served_name
    if filled:
        source += f" (by default on {device}: " + ", ".join(f"{key} {value:g}" for key, value in filled.items()) + ")"
    return parse(ResolvedEngine, data, source=source)
