"""Gemma 3, text only: a Gemma 2 with normed heads, and more sliding layers, which have their own rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from raylm.layers.rope_settings import RopeSettings
from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.families.gemma import read_gemma2, read_gemma2_gguf
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import GGUF_SANDWICH_WEIGHTS, TEXT_BESIDE_VISION, TensorNames
from raylm.models.read_layers import LayerKind, named_kinds, repeated_kinds, rope_of

_PATTERN = 6
"""Of so many layers the last is full, in all released models."""
_LOCAL_THETA = 1e4
_LAYERS_OF_27B = 62


def _read(fields: Fields) -> ArchConfig:
    ropes: dict[LayerKind, RopeSettings] = {
        "full": rope_of(fields, "full"),
        # Only the full layers were stretched to longer texts.
        "sliding": rope_of(fields, "sliding", theta=fields.number("rope_local_base_freq"), is_scaled=False),
    }
    kinds = _kinds(fields)
    used = {kind: rope for kind, rope in ropes.items() if kind in kinds}
    return replace(read_gemma2(fields, kinds, used), qk_norm="head")


def _kinds(fields: Fields) -> list[LayerKind]:
    count = fields.integer("num_hidden_layers")
    if fields.get("sliding_window") is None:
        return ["full"] * count
    return named_kinds(fields) or repeated_kinds(count, fields.integer("sliding_window_pattern"))


def _read_gguf(header: read_gguf.Header) -> ArchConfig:
    fields, prefix, head_dim = header.fields, header.prefix, read_gguf.head_dim_of(header)
    kinds = read_gguf.kinds_of(header, _PATTERN)
    local = RopeSettings(fields.number(prefix + "rope.freq_base_swa", _LOCAL_THETA))
    ropes: dict[LayerKind, RopeSettings] = {"full": read_gguf.rope_of(header, head_dim), "sliding": local}
    return replace(read_gemma2_gguf(header, kinds, ropes, layers_of_27b=_LAYERS_OF_27B), qk_norm="head")


_NAMES = TensorNames(gguf=GGUF_SANDWICH_WEIGHTS)
_DEFAULTS: dict[str, object] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
ARCHITECTURES = {
    "Gemma3ForCausalLM": Family(read=_read, defaults=_DEFAULTS, gguf={"gemma3": _read_gguf}, names=_NAMES),
    # The text model inside a checkpoint that also sees images: its vision weights are not loaded.
    "Gemma3ForConditionalGeneration": Family(
        read=_read,
        defaults=_DEFAULTS,
        names=TEXT_BESIDE_VISION,
    ),
}
