"""JSON files of models."""

from __future__ import annotations

import json
from pathlib import Path

from raylm.errors import ConfigError

_MAX_BYTES = 16 << 20
"""Descriptions of models have some kilobytes."""


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises ConfigError."""
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise ConfigError(f"{path}: has {size} bytes; allowed: at most {_MAX_BYTES}")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object, not {type(values).__name__}")
    return values
