"""Logging: one line per change of state, with ids and numbers; nothing per token."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
Field = str | int | float | None
_EVENT, _FIELDS = "raylm_event", "raylm_fields"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger of one module, below the logger "raylm"."""
    return logging.getLogger(name if name.startswith("raylm") else f"raylm.{name}")


def configure(level: str = "INFO", *, form: LogFormat = "text") -> None:
    """Print raylm's log lines to stderr, as text or as JSON objects. Called by programs (cli, actors), never by the
    library."""
    logger = logging.getLogger("raylm")
    if form == "json":
        # Serve gives a replica another sys.stderr, whose lines it writes into a file behind words of its own.
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(JsonLines())
        logger.handlers[:] = [handler]
        logger.propagate = False
    elif not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)


def event(logger: logging.Logger, name: str, **fields: Field) -> None:
    """One line for something that happened, with its fields; those that are None are left out."""
    if not logger.isEnabledFor(logging.INFO):
        return
    told = {key: value for key, value in fields.items() if value is not None}
    words = " ".join(f"{key}={_word(value)}" for key, value in told.items())
    logger.info("%s %s", name, words, extra={_EVENT: name, _FIELDS: told})


def _word(value: Field) -> str:
    """A line of text stays one line, whatever a client puts into a path."""
    word = str(value)
    return word if word.isprintable() and " " not in word else json.dumps(word)


class JsonLines(logging.Formatter):
    """A JSON object a line: time (UTC), level, logger and message, or the event and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": at, "level": record.levelname, "logger": record.name}
        if (name := getattr(record, _EVENT, None)) is not None:
            line |= {"event": name, **getattr(record, _FIELDS)}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


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
