"""Mistral: a Llama whose layers may all have a sliding window. Ministral: of which some may. Mistral Small 3.1 and 3.2:
the text model inside a checkpoint that also sees images."""

from __future__ import annotations

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import TEXT_BESIDE_VISION
from raylm.models.read_folder import dense
from raylm.models.read_layers import named_kinds, uniform_kinds


def read_mistral(fields: Fields) -> ArchConfig:
    """All layers slide where config.json has a window. Raises ConfigError."""
    return dense(fields, kinds=uniform_kinds(fields))


def _read_ministral(fields: Fields) -> ArchConfig:
    return dense(fields, kinds=named_kinds(fields) or uniform_kinds(fields))


def _read_mistral3(fields: Fields) -> ArchConfig:
    text = fields.section("text_config")
    if (kind := text.get("model_type")) != "mistral":
        raise text.error("model_type", kind, "mistral")
    # A null there is not seen, and stands for none.
    return read_mistral(fields.having(sliding_window=text.get("sliding_window")))


_DEFAULTS: dict[str, object] = {"max_position_embeddings": 131072, "sliding_window": 4096}
ARCHITECTURES = {
    "MistralForCausalLM": Family(read=read_mistral, defaults=_DEFAULTS),
    "MinistralForCausalLM": Family(read=_read_ministral, defaults=_DEFAULTS),
    "Mistral3ForConditionalGeneration": Family(read=_read_mistral3, defaults=_DEFAULTS, names=TEXT_BESIDE_VISION),
}
