"""Which files hold a model's weights; those of a remote model are brought here first. Without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal, NamedTuple

from raylm.errors import ConfigError
from raylm.model_files.gguf_shards import shards
from raylm.model_files.source import ModelSource

WeightFormat = Literal["safetensors", "pt", "mistral", "gguf"]


class WeightFiles(NamedTuple):
    """The files, and how tensors lie in them."""

    format: WeightFormat
    paths: list[Path]


class _Naming(NamedTuple):
    """What a format's files are called."""

    single: str
    others: str | None
    """A pattern for a single file of any other name."""

    @property
    def index_file(self) -> str:
        return f"{self.single}.index.json"


_NAMINGS: dict[WeightFormat, _Naming] = {
    "safetensors": _Naming("model.safetensors", "*.safetensors"),
    "mistral": _Naming("consolidated.safetensors", None),
    "pt": _Naming("pytorch_model.bin", None),
}
"""In the order in which they are looked for."""
_NOT_WEIGHTS = ("consolidated*", "*/*")
"""The weights once more in another format, and what lies in folders of a repository."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MAX_FILES = 10_000


def weight_files(source: ModelSource, load_format: str = "auto") -> WeightFiles:
    """The files of one format: that of `load_format`, or the first that is there.

    Raises ConfigError when there are none, or one is missing.
    """
    if source.kind == "gguf":
        return WeightFiles("gguf", shards(source.path))
    wanted = {name: naming for name, naming in _NAMINGS.items() if load_format in ("auto", name)}
    for name, naming in wanted.items():
        if paths := _files_of(source, naming):
            return WeightFiles(name, paths)
    place = source.path if source.remote is None else source.remote.name
    allowed = " or ".join(f"{naming.single} (or several files and {naming.index_file})" for naming in wanted.values())
    raise ConfigError(f"{place}: holds no weights; allowed: {allowed}{_seen(source.path)}")


def _files_of(source: ModelSource, naming: _Naming) -> list[Path]:
    """All files of the format; none where the source has not this format."""
    folder = source.path
    index = folder / naming.index_file
    if index.is_file():
        names = _indexed(index)
        _fetch(source, names)
        if missing := [name for name in names if not (folder / name).is_file()]:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ConfigError(f"{index}: names files that are missing: {', '.join(missing[:8])}{more}")
        return [folder / name for name in names]
    _fetch(source, [naming.single])
    if (folder / naming.single).is_file():
        return [folder / naming.single]
    if naming.others is None:
        return []
    _fetch(source, [naming.others], exclude=_NOT_WEIGHTS)
    paths = sorted(path for path in folder.glob(naming.others) if not path.match(_NOT_WEIGHTS[0]))
    if len(paths) > 1:
        raise ConfigError(
            f"{folder}: holds {len(paths)} safetensors files without an index; "
            f"allowed: {naming.single}, or several files and {naming.index_file}"
        )
    return paths


def _fetch(source: ModelSource, patterns: list[str], exclude: tuple[str, ...] = ()) -> None:
    if source.remote is not None:
        source.remote.fetch(patterns, exclude=exclude)


def _indexed(index: Path) -> list[str]:
    """The files that an index names, each once. Raises ConfigError."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ConfigError(f"{index}: not an index of weight files: it has no mapping weight_map") from None
    if not names or len(names) > _MAX_FILES:
        raise ConfigError(f"{index}: names {len(names)} files; allowed: 1 to {_MAX_FILES}")
    for name in names:
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise ConfigError(f"{index}: names the file {name!r:.100}; allowed: a name in the same folder")
    return sorted(names)


def _seen(folder: Path) -> str:
    """What lies there instead, in formats of others."""
    for pattern, what in _FOREIGN.items():
        if found := sorted(folder.glob(pattern)):
            return f"; {found[0].name} is {what}"
    return ""


_SAVE = "load it with transformers and write it with save_pretrained(FOLDER)"
_FOREIGN = {
    "*.tensors": f"tensorizer's: {_SAVE}",
    "model-rank-*": f"vLLM's sharded_state, cut for its ranks: {_SAVE} from the original checkpoint",
    "consolidated*.pth": "Meta's own: take the repository's files in transformers' format, or convert it with "
    "transformers.models.llama.convert_llama_weights_to_hf",
    "*.pth": f"a pickle of an unknown program's: {_SAVE}",
    "*.pt": f"a pickle of an unknown program's: {_SAVE}",
    "*.ckpt": f"a pickle of an unknown program's: {_SAVE}",
    "*.bin": "a pickle of another name than pytorch_model.bin",
    "*.h5": f"TensorFlow's: {_SAVE}",
    "*.msgpack": f"Flax's: {_SAVE}",
    "*.onnx": f"ONNX: {_SAVE} from the original checkpoint",
    "*.npz": f"numpy's: {_SAVE}",
}
"""Files of formats that are not read -> what they are and how they become one that is."""
