"""Where a model's files are: a folder, a GGUF file, or the demo model's name."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raylm.config.demo import DEMO_MODELS
from raylm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk. `path` is the .gguf file, or the folder that holds config.json."""

    path: Path
    kind: Literal["gguf", "folder"]


def locate(path: str, *, field: str = "model.path") -> ModelSource:
    """Find the model that a field of the configuration names.

    Raises ConfigError saying what was looked for and what is allowed.
    """
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
        f"{field} {path!r} {reason}; allowed: a folder with config.json, a .gguf file, "
        f"or a demo model ({', '.join(DEMO_MODELS)})"
    )


def _demo(name: str) -> ModelSource:
    demo = DEMO_MODELS[name]
    spec = importlib.util.find_spec(demo.package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"model.path {name!r} needs its package: {demo.install}")
    for file in sorted(Path(spec.origin).parent.rglob("*.gguf")):
        return ModelSource(file, "gguf")
    raise ConfigError(f"model.path {name!r}: the package {demo.package} holds no .gguf file")
