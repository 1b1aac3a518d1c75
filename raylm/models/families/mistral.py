"""Mistral: a Llama whose layers may all have a sliding window. Ministral: of which some may. Ministral 3: without
windows, and with queries that grow with their positions. Mistral Small 3.1 and 3.2 and Ministral 3 also come as the
text model inside a checkpoint that sees images."""

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
    kind = text.get("model_type")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise text.error("model_type", kind, f"one of {', '.join(_TEXTS)}")
    # A null there is not seen, and stands for none.
    return _TEXTS[kind](fields.having(sliding_window=text.get("sliding_window")))


def _read_ministral3(fields: Fields) -> ArchConfig:
    has_rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    return read_mistral(fields if has_rope else fields.having(rope_parameters=_ROPE_OF_3))


_TEXTS = {"mistral": read_mistral, "ministral3": _read_ministral3}
"""Models inside Mistral3ForConditionalGeneration, by their model_type."""
_ROPE_OF_3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_DEFAULTS: dict[str, object] = {"max_position_embeddings": 131072, "sliding_window": 4096}
ARCHITECTURES = {
    "MistralForCausalLM": Family(read=read_mistral, defaults=_DEFAULTS),
    "MinistralForCausalLM": Family(read=_read_ministral, defaults=_DEFAULTS),
    "Ministral3ForCausalLM": Family(read=_read_ministral3, defaults={"max_position_embeddings": 262144}),
    "Mistral3ForConditionalGeneration": Family(read=_read_mistral3, defaults=_DEFAULTS, names=TEXT_BESIDE_VISION),
}
