"""Falcon: attention and MLP side by side behind LayerNorms, few heads of keys, no biases. Falcon-RW has
linear biases for positions, which are divided by the square root of a head's size as the scores are."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import MEGATRON_WEIGHTS, TensorNames
from raylm.models.read_folder import dense, mlp_of

_FIRST_40B = "RefinedWeb"
"""What the first release of the 40B, and of the 7B RefinedWebModel, calls its type of model."""


def _read(fields: Fields) -> ArchConfig:
    has_alibi = fields.flag("alibi", False)
    is_new = fields.flag("new_decoder_architecture", fields.get("model_type") == _FIRST_40B)
    biased = fields.flag("bias", False)
    is_parallel = is_new or fields.flag("parallel_attn", True)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_kv_heads", heads)
    if not is_new and fields.flag("multi_query", True):
        kv_heads = 1
    norms = fields.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    size = fields.integer("ffn_hidden_size", 4 * fields.integer("hidden_size"))
    sized = fields.having(num_key_value_heads=kv_heads, intermediate_size=size)
    mlp = mlp_of(sized, activation="gelu", name="activation", gated=False, bias=biased)
    arch = dense(sized, ropes={} if has_alibi else None, mlp=mlp)
    return replace(
        arch,
        alibi=arch.attention_scale if has_alibi else 0.0,
        norm="layer",
        norm_place="parallel" if is_parallel else "pre",
        shared_norm=is_parallel and norms == 1,
        qkv_bias=biased,
        o_bias=biased,
    )


ARCHITECTURES = {
    "FalconForCausalLM": Family(
        read=_read,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 11,
            "eos_token_id": 11,
        },
        field_names={
            "layer_norm_epsilon": "rms_norm_eps",
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_kv_heads",
        },
        names=TensorNames(
            folder={
                "word_embeddings": ("embed_tokens", None),
                "h": ("layers", None),
                "ln_attn": ("input_layernorm", None),
                "ln_mlp": ("post_attention_layernorm", None),
                "self_attention": ("self_attn", None),
                **MEGATRON_WEIGHTS,
                "ln_f": ("norm", None),
            },
            qkv_groups=True,
            prefixes=("transformer.",),
        ),
    )
}
# The first releases.
ARCHITECTURES["RWForCausalLM"] = ARCHITECTURES["FalconForCausalLM"]
