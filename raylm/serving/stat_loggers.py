"""Stat loggers: plug-ins that are told what /metrics is told."""

from __future__ import annotations

from typing import Protocol

from raylm.errors import ConfigError
from raylm.generation.served_model import EngineStats
from raylm.log import get_logger
from raylm.plugins import load_plugins

logger = get_logger(__name__)


class StatLogger(Protocol):
    """One plug-in (raylm.stat_loggers), made in every replica of a model with its name and its engine's id."""

    def record(self, stats: EngineStats) -> None:
        """Called once a second; it must not block."""


class StatLoggers:
    """All of a replica. One that fails is left out from then on, and the log says so."""

    def __init__(self, model: str, engine_id: str) -> None:
        """Raises ConfigError for a plug-in that cannot be made."""
        found = load_plugins("raylm.stat_loggers")
        self._loggers = {name: _make(name, make, model, engine_id) for name, make in found.items()}

    def record(self, stats: EngineStats) -> None:
        for name, each in list(self._loggers.items()):
            try:
                each.record(stats)
            except Exception as error:
                logger.warning("the stat logger %r is left out from now on: %r", name, error)
                del self._loggers[name]


def _make(name: str, make: object, model: str, engine_id: str) -> StatLogger:
    if not callable(make):
        raise ConfigError(f"the plug-in {name!r} (raylm.stat_loggers) is {make!r}; allowed: what makes a StatLogger")
    made: StatLogger = make(model, engine_id)
    return made
