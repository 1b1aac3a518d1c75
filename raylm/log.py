"""Logging: one line per change of state, with ids and numbers; nothing per token."""

from __future__ import annotations

import logging

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
