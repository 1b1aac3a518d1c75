"""GPT-2: learned positions, LayerNorms, biases, and weights that are stored as columns."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import TensorNames
from raylm.models.read_folder import dense, mlp_of


def _read(fields: Fields) -> ArchConfig:
    for name, usual in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if fields.flag(name, usual) is not usual:
            raise fields.error(name, not usual, str(usual).lower())
    sized = fields.having(intermediate_size=fields.integer("n_inner", 4 * fields.integer("hidden_size")))
    mlp = mlp_of(sized, activation="gelu_new", name="activation_function", gated=False, bias=True)
    return replace(
        dense(sized, ropes={}, mlp=mlp),
        norm="layer",
        position_embeddings=fields.integer("max_position_embeddings"),
        qkv_bias=True,
        o_bias=True,
    )


ARCHITECTURES = {
    "GPT2LMHeadModel": Family(
        read=_read,
        defaults={
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        field_names={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        names=TensorNames(
            folder={
                "wte": ("embed_tokens", None),
                "wpe": ("embed_positions", None),
                "h": ("layers", None),
                "ln_1": ("input_layernorm", None),
                "ln_2": ("post_attention_layernorm", None),
                "attn.c_attn": ("self_attn.qkv_proj", None),
                "attn.c_proj": ("self_attn.o_proj", None),
                "c_fc": ("up_proj", None),
                "c_proj": ("down_proj", None),
                "ln_f": ("norm", None),
            },
            transposed=("c_attn", "c_proj", "c_fc"),
            prefixes=("transformer.",),
            ignored_ends=(".attn.bias", ".attn.masked_bias"),  # The causal mask.
        ),
    )
}
