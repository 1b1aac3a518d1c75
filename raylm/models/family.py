"""A family of models: all that is known of it before its weights are there. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raylm.models.arch import ArchConfig
from raylm.models.fields import Fields
from raylm.models.names import TensorNames
from raylm.models.read_gguf import Header


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture, as checkpoints name it. What its layers do is in the ArchConfig that it reads."""

    read: Callable[[Fields], ArchConfig]
    """config.json -> the model. What all models have is read by raylm.models.read_folder.dense."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What a missing field of config.json stands for: checkpoints may leave out what equals their family's defaults."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Own names of fields of config.json -> what others call them."""
    gguf: Mapping[str, Callable[[Header], ArchConfig]] = field(default_factory=dict)
    """Its name in GGUF files -> how their metadata are read; empty where raylm reads none of it."""
    names: TensorNames = TensorNames()
    model: str = "raylm.models.decoder:DecoderModel"
    """The class, "module:Class": imported with torch, when a model is built."""
