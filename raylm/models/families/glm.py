"""GLM-4: a Llama that rotates half of each head, dimensions in pairs. GLM-4-0414: with sandwich norms."""

from __future__ import annotations

from dataclasses import replace

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import GGUF_SANDWICH_WEIGHTS, HF_WEIGHTS, TensorNames
from raylm.models.read_folder import dense


def _read(fields: Fields) -> ArchConfig:
    return replace(dense(fields), qkv_bias=fields.flag("attention_bias", False))


def _read_glm4(fields: Fields) -> ArchConfig:
    return replace(_read(fields), norm_place="sandwich")


def _read_glm4_gguf(header: read_gguf.Header) -> ArchConfig:
    return replace(read_gguf.dense(header), norm_place="sandwich")


_DEFAULTS: dict[str, object] = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}
_SANDWICH = {
    "post_self_attn_layernorm": ("post_attention_layernorm", None),
    "post_attention_layernorm": ("pre_feedforward_layernorm", None),
    "post_mlp_layernorm": ("post_feedforward_layernorm", None),
}
ARCHITECTURES = {
    "GlmForCausalLM": Family(read=_read, defaults=_DEFAULTS, names=TensorNames(pairs=True)),
    "Glm4ForCausalLM": Family(
        read=_read_glm4,
        defaults=_DEFAULTS,
        gguf={"glm4": _read_glm4_gguf},
        names=TensorNames(
            folder={**HF_WEIGHTS, **_SANDWICH},
            # Gate and up are one tensor.
            gguf={**GGUF_SANDWICH_WEIGHTS, "ffn_up": ("mlp.gate_up_proj", None)},
            pairs=True,
            gguf_pairs=True,
        ),
    ),
}
