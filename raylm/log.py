"""Logging: one line per change of state, with ids and numbers; nothing per token."""

from __future__ import annotations

import logging
import time

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger of one module, below the logger "raylm"."""
    return logging.getLogger(name if name.startswith("raylm") else f"raylm.{name}")


def configure(level: str = "INFO") -> None:
    """Print raylm's log lines to stderr. Called by programs (cli, actors), never by the library."""
    logger = logging.getLogger("raylm")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)


class Laps:
    """Seconds of the parts of a start, one after the other, for one line."""

    def __init__(self) -> None:
        self._begin = self._last = time.monotonic()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The part since the lap before is over."""
        now = time.monotonic()
        self._seconds[name] = now - self._last
        self._last = now

    def __str__(self) -> str:
        return parts(self._last - self._begin, self._seconds)


def parts(total: float, seconds: dict[str, float]) -> str:
    """What something took, and what of it; `raylm bench startup` reads it."""
    return f"{total:.2f} s: " + ", ".join(f"{name} {part:.2f}" for name, part in seconds.items())
