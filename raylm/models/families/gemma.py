"""Gemma: norm weights are stored less 1, the embedding is scaled. Gemma 2: sandwich norms, sliding and full layers in
turns, soft caps of scores and logits."""

from __future__ import annotations

from dataclasses import replace

from raylm.layers.rope_settings import RopeSettings
from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.read_folder import dense, mlp_of
from raylm.models.read_layers import LayerKind, named_kinds, repeated_kinds

_ACTIVATION = "gelu_pytorch_tanh"


def _read(fields: Fields) -> ArchConfig:
    # The first checkpoints say "gelu" and mean this one.
    legacy = fields.having(hidden_act=_ACTIVATION) if fields.get("hidden_act") == "gelu" else fields
    return _gemma(fields, dense(fields, mlp=mlp_of(legacy, activation=_ACTIVATION)))


def _read_gemma2(fields: Fields) -> ArchConfig:
    return read_gemma2(fields, _kinds(fields))


def read_gemma2(
    fields: Fields, kinds: list[LayerKind], ropes: dict[LayerKind, RopeSettings] | None = None
) -> ArchConfig:
    """A Gemma 2 of such layers; `ropes` as dense takes them. Raises ConfigError."""
    mlp = mlp_of(fields, activation=_ACTIVATION, name="hidden_activation")
    return replace(
        _gemma(fields, dense(fields, kinds=kinds, ropes=ropes, mlp=mlp)),
        norm_place="sandwich",
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=fields.number("attn_logit_softcapping", 0.0),
        logits_soft_cap=fields.number("final_logit_softcapping", 0.0),
    )


def _kinds(fields: Fields) -> list[LayerKind]:
    count = fields.integer("num_hidden_layers")
    if fields.get("sliding_window") is None:
        return ["full"] * count
    return named_kinds(fields) or repeated_kinds(count, 2)


def _gemma(fields: Fields, arch: ArchConfig) -> ArchConfig:
    biased = fields.flag("attention_bias", False)
    multiplier = arch.hidden_size**0.5
    return replace(arch, qkv_bias=biased, o_bias=biased, norm_offset=1.0, embedding_multiplier=multiplier)


_DEFAULTS: dict[str, object] = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_DEFAULTS_2: dict[str, object] = {
    **_DEFAULTS,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
ARCHITECTURES = {
    "GemmaForCausalLM": Family(read=_read, defaults=_DEFAULTS),
    "Gemma2ForCausalLM": Family(read=_read_gemma2, defaults=_DEFAULTS_2),
}
