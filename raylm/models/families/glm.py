"""GLM-4: a Llama that rotates half of each head, dimensions in pairs. GLM-4-0414: with sandwich norms. ChatGLM 2 and 3,
and GLM-4 as it was first released: the same by their own names."""

from __future__ import annotations

from dataclasses import replace

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import GGUF_SANDWICH_WEIGHTS, HF_WEIGHTS, MEGATRON_WEIGHTS, TensorNames
from raylm.models.read_folder import dense


def _read(fields: Fields) -> ArchConfig:
    return replace(dense(fields), qkv_bias=fields.flag("attention_bias", True))


def _read_glm4(fields: Fields) -> ArchConfig:
    return replace(_read(fields), norm_place="sandwich")


def _read_chatglm(fields: Fields) -> ArchConfig:
    for name, usual in (("position_encoding_2d", False), ("add_bias_linear", False), ("rmsnorm", True)):
        if fields.flag(name, usual) is not usual:
            raise fields.error(name, not usual, str(usual).lower())
    kv_heads, has_groups = fields.get("multi_query_group_num"), fields.flag("multi_query_attention", False)
    theta = 1e4 * fields.number("rope_ratio", 1.0)
    own = fields.having(num_key_value_heads=kv_heads if has_groups else None, rope_theta=theta)
    return replace(dense(own), qkv_bias=fields.flag("add_qkv_bias", False))


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
_CHATGLM = Family(
    read=_read_chatglm,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    field_names={
        "num_layers": "num_hidden_layers",
        "padded_vocab_size": "vocab_size",
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "layernorm_epsilon": "rms_norm_eps",
        "seq_length": "max_position_embeddings",
    },
    names=TensorNames(
        folder={
            "embedding.word_embeddings": ("embed_tokens", None),
            "encoder.layers": ("layers", None),
            "self_attention": ("self_attn", None),
            **MEGATRON_WEIGHTS,
            "dense_h_to_4h": ("gate_up_proj", None),
            "encoder.final_layernorm": ("norm", None),
            "output_layer": ("lm_head", None),
        },
        pairs=True,
        prefixes=("transformer.",),
        ignored_ends=("rotary_pos_emb.inv_freq",),
    ),
)
ARCHITECTURES = {
    "ChatGLMModel": _CHATGLM,
    "ChatGLMForConditionalGeneration": _CHATGLM,
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
