"""Mistral: a Llama whose layers may all have a sliding window. Ministral: of which some may."""

from __future__ import annotations

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.read_folder import dense, named_kinds


def read_mistral(fields: Fields) -> ArchConfig:
    """All layers slide where config.json has a window. Raises ConfigError."""
    if fields.get("sliding_window") is None:
        return dense(fields)
    return dense(fields, kinds=["sliding"] * fields.integer("num_hidden_layers"))


def _read_ministral(fields: Fields) -> ArchConfig:
    kinds = named_kinds(fields)
    return read_mistral(fields) if kinds is None else dense(fields, kinds=kinds)


_DEFAULTS: dict[str, object] = {"max_position_embeddings": 131072, "sliding_window": 4096}
ARCHITECTURES = {
    "MistralForCausalLM": Family(read=read_mistral, defaults=_DEFAULTS),
    "MinistralForCausalLM": Family(read=_read_ministral, defaults=_DEFAULTS),
}
