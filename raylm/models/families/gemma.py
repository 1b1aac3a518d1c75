"""Gemma: norm weights are stored less 1, the embedding is scaled. Gemma 2: sandwich norms, sliding and full layers in
turns, soft caps of scores and logits."""

from __future__ import annotations

from dataclasses import replace

from raylm.layers.rope_settings import RopeSettings
from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import GGUF_SANDWICH_WEIGHTS, TensorNames
from raylm.models.read_folder import dense, mlp_of
from raylm.models.read_layers import LayerKind, named_kinds, repeated_kinds

_ACTIVATION = "gelu_pytorch_tanh"
_LAYERS_OF_27B = 46


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


def _read_gguf(header: read_gguf.Header) -> ArchConfig:
    arch = read_gguf.dense(header, activation="gelu_tanh")
    return replace(arch, embedding_multiplier=arch.hidden_size**0.5)


def _read_gemma2_gguf(header: read_gguf.Header) -> ArchConfig:
    # The first files leave out what equals llama.cpp's defaults.
    prefix = header.prefix
    usual = {"attention.sliding_window": 4096, "final_logit_softcapping": 30.0}
    missing = {prefix + name: value for name, value in usual.items() if header.fields.get(prefix + name) is None}
    header = header._replace(fields=header.fields.having(**missing))
    kinds = read_gguf.kinds_of(header, 2)
    cap = header.fields.number(prefix + "attn_logit_softcapping", 50.0)
    return replace(read_gemma2_gguf(header, kinds, layers_of_27b=_LAYERS_OF_27B), attention_soft_cap=cap)


def read_gemma2_gguf(
    header: read_gguf.Header,
    kinds: list[LayerKind],
    ropes: dict[LayerKind, RopeSettings] | None = None,
    *,
    layers_of_27b: int,
) -> ArchConfig:
    """As read_gemma2, without soft caps of scores. llama.cpp has added 1 to the norms' weights."""
    arch = read_gguf.dense(header, kinds=kinds, ropes=ropes, activation="gelu_tanh")
    # The largest one's scores are scaled by what its heads would have if they were as wide as the model.
    size = arch.hidden_size // arch.num_heads if len(kinds) == layers_of_27b else arch.head_dim
    return replace(arch, norm_place="sandwich", embedding_multiplier=arch.hidden_size**0.5, attention_scale=size**-0.5)


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
    "GemmaForCausalLM": Family(read=_read, defaults=_DEFAULTS, gguf={"gemma": _read_gguf}),
    "Gemma2ForCausalLM": Family(
        read=_read_gemma2,
        defaults=_DEFAULTS_2,
        gguf={"gemma2": _read_gemma2_gguf},
        names=TensorNames(gguf=GGUF_SANDWICH_WEIGHTS),
    ),
}
