"""A configuration once the device is known: what by default depends on the device is a number here."""

from __future__ import annotations

from typing import Literal, NamedTuple

from raylm.config.base import parse
from raylm.config.engine import EngineConfig, NumBatchedTokens, NumSeqs, SchedulerConfig

DeviceKind = Literal["cpu", "cuda"]


class ResolvedScheduler(SchedulerConfig):
    """What the scheduler and the workers are given."""

    max_num_seqs: NumSeqs
    max_num_batched_tokens: NumBatchedTokens


class ResolvedEngine(EngineConfig):
    """What an engine, its executor and its workers are given."""

    scheduler: ResolvedScheduler


class _Defaults(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int


_DEFAULTS: dict[DeviceKind, _Defaults] = {
    "cpu": _Defaults(64, 2048),
    # A GPU reads its weights for a whole batch, so a larger one costs little; a step of 8,192 tokens fills it.
    "cuda": _Defaults(256, 8192),
}


def resolve(config: EngineConfig, device: DeviceKind) -> ResolvedEngine:
    """The configuration for a device, with its defaults filled in.

    Raises ConfigError when a value does not go with the default of another.
    """
    given = config.scheduler.model_dump()
    filled = {key: value for key, value in _DEFAULTS[device]._asdict().items() if given[key] is None}
    source = config.model.served_name
    if filled:
        source += f" (by default on {device}: " + ", ".join(f"{key} {value}" for key, value in filled.items()) + ")"
    return parse(ResolvedEngine, {**config.model_dump(), "scheduler": given | filled}, source=source)
