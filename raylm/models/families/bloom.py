"""BLOOM: linear biases for positions, LayerNorms, one of them behind the embedding, and an MLP without gate."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import MEGATRON_WEIGHTS, TensorNames
from raylm.models.read_folder import dense, mlp_of


def _read(fields: Fields) -> ArchConfig:
    sized = fields.having(intermediate_size=4 * fields.integer("hidden_size"))
    return replace(
        dense(sized, ropes={}, mlp=mlp_of(sized, activation="gelu_new", gated=False, bias=True)),
        alibi=1.0,
        norm="layer",
        embed_norm=True,
        qkv_bias=True,
        o_bias=True,
    )


ARCHITECTURES = {
    "BloomForCausalLM": Family(
        read=_read,
        defaults={
            "vocab_size": 250880,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            # What the published models were trained for; the biases themselves know no limit.
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        field_names={
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "layer_norm_epsilon": "rms_norm_eps",
            "seq_length": "max_position_embeddings",
        },
        names=TensorNames(
            folder={
                "word_embeddings": ("embed_tokens", None),
                "word_embeddings_layernorm": ("embed_norm", None),
                "h": ("layers", None),
                "self_attention": ("self_attn", None),
                **MEGATRON_WEIGHTS,
                "ln_f": ("norm", None),
            },
            qkv_groups=True,
            prefixes=("transformer.",),
        ),
    )
}
