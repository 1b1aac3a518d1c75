"""OPT: learned positions, of which the first two rows are padding, LayerNorms, biases and ReLU. The one of 350 million
parameters norms the stream itself behind attention and MLP, and its embedding is narrower than its layers."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import TensorNames
from raylm.models.read_folder import dense, mlp_of

_OFFSET = 2


def _read(fields: Fields) -> ArchConfig:
    for name, usual in (("layer_norm_elementwise_affine", True), ("_remove_final_layer_norm", False)):
        if fields.flag(name, usual) is not usual:
            raise fields.error(name, not usual, str(usual).lower())
    hidden_size = fields.integer("hidden_size")
    width = fields.integer("word_embed_proj_dim", hidden_size)
    biased = fields.flag("enable_bias", True)
    mlp = mlp_of(fields, activation="relu", name="activation_function", gated=False, bias=biased)
    return replace(
        dense(fields, ropes={}, mlp=mlp),
        norm="layer",
        norm_place="pre" if fields.flag("do_layer_norm_before", True) else "after",
        embedding_size=0 if width == hidden_size else width,
        position_embeddings=fields.integer("max_position_embeddings") + _OFFSET,
        position_offset=_OFFSET,
        qkv_bias=biased,
        o_bias=biased,
    )


ARCHITECTURES = {
    "OPTForCausalLM": Family(
        read=_read,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
        },
        field_names={"ffn_dim": "intermediate_size"},
        names=TensorNames(
            folder={
                "q_proj": ("qkv_proj", "q"),
                "k_proj": ("qkv_proj", "k"),
                "v_proj": ("qkv_proj", "v"),
                "out_proj": ("o_proj", None),
                "self_attn_layer_norm": ("input_layernorm", None),
                # Whole, it is the last norm; in a layer, that before the MLP.
                "final_layer_norm": ("post_attention_layernorm", None),
                "decoder.final_layer_norm": ("norm", None),
                "decoder.layers": ("layers", None),
                "decoder.embed_tokens": ("embed_tokens", None),
                "decoder.project_in": ("project_in", None),
                "decoder.project_out": ("project_out", None),
                "decoder.embed_positions": ("embed_positions", None),
                "fc1": ("mlp.up_proj", None),
                "fc2": ("mlp.down_proj", None),
            },
        ),
    )
}
