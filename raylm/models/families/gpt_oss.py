"""GPT-OSS: experts with biases and a clamped SwiGLU in every layer, attention with sinks, every second layer with
a window. Its experts are released as MXFP4 and loaded as numbers of the model's type."""

from __future__ import annotations

from dataclasses import replace

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig, ExpertsSpec
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import GGUF_WEIGHTS, HF_WEIGHTS, TensorNames
from raylm.models.read_folder import dense, experts_of, with_experts
from raylm.models.read_layers import named_kinds, repeated_kinds

_ALPHA = 1.702
"""The only one that the operator has."""
_LIMIT = 7.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(fields: Fields) -> ArchConfig:
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        fields = fields.having(rope_scaling=_YARN)
    if (alpha := fields.number("swiglu_alpha", _ALPHA)) != _ALPHA:
        raise fields.error("swiglu_alpha", alpha, str(_ALPHA))
    kinds = named_kinds(fields)
    if kinds is None:
        kinds = repeated_kinds(fields.integer("num_hidden_layers"), 2)
    biased = fields.flag("attention_bias", True)
    arch = replace(dense(fields, kinds=kinds), qkv_bias=biased, o_bias=biased, sinks=True)
    experts = replace(
        experts_of(fields, size="intermediate_size", normalized=True),
        activation="clamped_swiglu",
        limit=fields.number("swiglu_limit", _LIMIT),
        bias=True,
        router_bias=True,
    )
    return with_experts(arch, experts)


def _read_gguf(header: read_gguf.Header) -> ArchConfig:
    kinds = read_gguf.kinds_of(header, 2)
    rope = replace(read_gguf.rope_of(header, read_gguf.head_dim_of(header)), truncate=False)
    arch = read_gguf.dense(header, kinds=kinds, ropes={"full": rope, "sliding": rope}, normalized=True)
    layers = [
        replace(layer, mlp=replace(layer.mlp, activation="clamped_swiglu", limit=_LIMIT))
        if isinstance(layer.mlp, ExpertsSpec)
        else layer
        for layer in arch.layers
    ]
    return replace(arch, sinks=True, layers=tuple(layers))


ARCHITECTURES = {
    "GptOssForCausalLM": Family(
        read=_read,
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            # The released config.json names no type.
            "torch_dtype": "bfloat16",
        },
        field_names={"num_local_experts": "num_experts"},
        gguf={"gpt-oss": _read_gguf},
        names=TensorNames(
            gguf={
                **GGUF_WEIGHTS,
                "post_attention_norm": ("post_attention_layernorm", None),
                "attn_sinks.weight": ("self_attn.sinks", None),
            },
            folder={
                **{name: HF_WEIGHTS[name] for name in ("q_proj", "k_proj", "v_proj")},
                "router": ("gate", None),
                "gate_up_proj": ("gate_up_proj.weight", None),
                "gate_up_proj_bias": ("gate_up_proj.bias", None),
                "gate_up_proj_blocks": ("gate_up_proj.blocks", None),
                "gate_up_proj_scales": ("gate_up_proj.scales", None),
                "down_proj": ("down_proj.weight", None),
                "down_proj_bias": ("down_proj.bias", None),
                "down_proj_blocks": ("down_proj.blocks", None),
                "down_proj_scales": ("down_proj.scales", None),
            },
            transposed=("gate_up_proj", "down_proj"),
            gate_up_turns=True,
            packed=True,
        ),
    )
}
