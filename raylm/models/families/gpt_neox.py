"""GPT-NeoX (Pythia, RedPajama ...): attention and MLP side by side, each behind its LayerNorm, biases, and a quarter of
each head rotated."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import MEGATRON_WEIGHTS, ROTARY_BUFFERS, TensorNames
from raylm.models.read_folder import dense, mlp_of


def _read(fields: Fields) -> ArchConfig:
    biased = fields.flag("attention_bias", True)
    return replace(
        dense(fields, mlp=mlp_of(fields, activation="gelu", gated=False, bias=True)),
        norm="layer",
        norm_place="parallel" if fields.flag("use_parallel_residual", True) else "pre",
        qkv_bias=biased,
        o_bias=biased,
    )


ARCHITECTURES = {
    "GPTNeoXForCausalLM": Family(
        read=_read,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        field_names={
            "layer_norm_eps": "rms_norm_eps",
            "rotary_pct": "partial_rotary_factor",
            "rotary_emb_base": "rope_theta",
        },
        names=TensorNames(
            folder={
                "embed_in": ("embed_tokens", None),
                "embed_out": ("lm_head", None),
                "attention": ("self_attn", None),
                **MEGATRON_WEIGHTS,
                "final_layer_norm": ("norm", None),
            },
            qkv_groups=True,
            prefixes=("gpt_neox.",),
            # Old checkpoints have the causal mask.
            ignored_ends=(*ROTARY_BUFFERS, ".attention.bias", ".attention.masked_bias"),
        ),
    )
}
