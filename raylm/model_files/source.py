"""Where a model's files are: a folder, a GGUF file, a name on the Hugging Face hub, a URL, or the demo model's name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from raylm.config.demo import DEMO_MODELS
from raylm.config.hub_name import hub_name
from raylm.errors import ConfigError


class Remote(Protocol):
    """The place that a folder is a copy of."""

    @property
    def name(self) -> str:
        """How messages name it."""
        ...

    @property
    def revision(self) -> str:
        """The commit."""
        ...

    def fetch(self, patterns: Sequence[str], *, exclude: Sequence[str] = ()) -> None:
        """Bring the files whose paths match into the folder; those that are there already cost nothing. Each file
        appears whole or not at all. Raises ConfigError saying why a file cannot be brought."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk. `path` is the .gguf file, or the folder that holds config.json (or Mistral's params.json)."""

    path: Path
    kind: Literal["gguf", "folder"]
    remote: Remote | None = None
    """Where the folder's weights come from when they are read; None: they are here."""


def locate(path: str, *, field: str = "model.path") -> ModelSource:
    """Find the model that a field of the configuration names. Of a model on the hub or in an object store everything
    but the weights is downloaded (a GGUF file is downloaded whole).

    Raises ConfigError saying what was looked for and what is allowed.
    """
    if path in DEMO_MODELS:
        return _demo(path)
    name = hub_name(path)
    if name is None and "://" in path:
        # The libraries of stores are for those who have models there.
        from raylm.model_files.stores import locate_in_store

        return locate_in_store(path, field=field)
    if name is not None:
        # Half a second to import, and needed for no other model.
        from raylm.model_files.hub import locate_on_hub

        return locate_on_hub(name, field=field)
    return _local(path, field)


def is_model(folder: Path) -> bool:
    """Whether the folder says what its model is: as transformers does, or as Mistral does."""
    return (folder / "config.json").is_file() or (folder / "params.json").is_file()


def _local(path: str, field: str) -> ModelSource:
    found = Path(os.path.expanduser(path))
    try:
        if found.is_file() and found.suffix == ".gguf":
            return ModelSource(found, "gguf")
        if is_model(found):
            return ModelSource(found, "folder")
        reason = "has no config.json" if found.is_dir() else "does not exist or is not a .gguf file"
    except OSError as error:
        reason = f"cannot be looked at ({error.strerror})"
    if not found.is_absolute():
        reason += f" (looked in {Path.cwd()}, and beside the configuration file where one names it)"
    raise ConfigError(
        f"{field} {path!r} {reason}; allowed: a folder with config.json, a .gguf file, a model of the Hugging Face "
        f"hub (owner/name), a URL (s3://, gs://), or a demo model ({', '.join(DEMO_MODELS)})"
    )


def _demo(name: str) -> ModelSource:
    demo = DEMO_MODELS[name]
    spec = importlib.util.find_spec(demo.package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"model.path {name!r} needs its package: {demo.install}")
    for file in sorted(Path(spec.origin).parent.rglob("*.gguf")):
        return ModelSource(file, "gguf")
    raise ConfigError(f"model.path {name!r}: the package {demo.package} holds no .gguf file")
