"""What can be said of a model on disk before anything is loaded. torch is imported only where it is to be split."""

from __future__ import annotations

from raylm.config.engine import EngineConfig
from raylm.config.source import ModelSource, locate
from raylm.errors import ConfigError
from raylm.models.arch import ArchConfig
from raylm.models.weight_files import weight_files

_FORMATS = {"gguf": "gguf", "folder": "safetensors"}
"""Kind of source -> the format of its weights."""


def check_model(config: EngineConfig) -> ArchConfig:
    """The model's description. Raises ConfigError where it is none that raylm runs, its weights are not there, or
    `parallel` cannot split it."""
    source = locate(config.model.path)
    arch = ArchConfig.from_source(source)
    check_format(source, config.model.load_format)
    if source.kind == "folder" and config.model.load_format != "dummy":
        weight_files(source.path)
    if config.parallel.num_workers > 1:
        import torch

        from raylm.models.outline import outline

        outline(arch, config.parallel, torch.bfloat16)
    return arch


def check_format(source: ModelSource, load_format: str) -> None:
    """Raises ConfigError when the source's weights are of another format than `load_format`, a LoadFormat."""
    native = _FORMATS[source.kind]
    if load_format not in ("auto", "dummy", native):
        raise ConfigError(f"model.load_format is {load_format!r}, but {source.path} allows: auto, dummy, {native}")
