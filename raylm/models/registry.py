"""Architecture name -> model class, imported only when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from raylm.errors import ConfigError

if TYPE_CHECKING:
    from raylm.models.decoder import DecoderModel

ARCHITECTURES = {
    "LlamaForCausalLM": "raylm.models.llama",
    "MistralForCausalLM": "raylm.models.mistral",
    "Qwen2ForCausalLM": "raylm.models.qwen2",
    "Qwen3ForCausalLM": "raylm.models.qwen3",
    "MiMoForCausalLM": "raylm.models.mimo",
    "Gemma3ForCausalLM": "raylm.models.gemma3",
    "Gemma3ForConditionalGeneration": "raylm.models.gemma3",
    "BloomForCausalLM": "raylm.models.bloom",
}
"""Name in config.json -> the module that has a class of this name."""


def model_class(architecture: str) -> type[DecoderModel]:
    """The class of an architecture. Raises ConfigError naming the allowed ones."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture is {architecture!r}; allowed: one of {', '.join(ARCHITECTURES)}")
    found: type[DecoderModel] = getattr(importlib.import_module(ARCHITECTURES[architecture]), architecture)
    return found
