"""Which files hold the weights of a folder. Without torch."""

from __future__ import annotations

import json
from pathlib import Path

from raylm.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises ConfigError when there are none, or one is missing."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(f"{index}: not an index of safetensors files") from None
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ConfigError(f"{index}: names files that are missing: {', '.join(missing)}")
        return [folder / name for name in names]
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ConfigError(
            f"{folder}: holds {len(files)} safetensors files without an index; "
            f"allowed: {SINGLE}, or several files and {INDEX}"
        )
    return files
