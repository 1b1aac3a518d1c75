"""Qwen2-MoE and Qwen3-MoE: a Qwen with experts in most layers, in Qwen2-MoE beside one that all tokens go through."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.families.qwen import DEFAULTS, read_qwen2, read_qwen3
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.read_folder import experts_of, mlp_of, with_experts


def _read_qwen2(fields: Fields) -> ArchConfig:
    shared = replace(mlp_of(fields), size=fields.integer("shared_expert_intermediate_size"))
    experts = replace(experts_of(fields), shared=shared, shared_gate=True)
    biased = replace(read_qwen2(fields), qkv_bias=fields.flag("qkv_bias", True))
    return with_experts(biased, experts, dense_layers=_dense_layers(fields))


def _read_qwen3(fields: Fields) -> ArchConfig:
    return with_experts(read_qwen3(fields), experts_of(fields), dense_layers=_dense_layers(fields))


def _dense_layers(fields: Fields) -> set[int]:
    step, named = fields.integer("decoder_sparse_step", 1), set(fields.token_ids("mlp_only_layers"))
    return {layer for layer in range(fields.integer("num_hidden_layers")) if layer in named or (layer + 1) % step}


def _read_qwen3_gguf(header: read_gguf.Header) -> ArchConfig:
    return replace(read_gguf.dense(header, normalized=True), qk_norm="head")


_FIELD_NAMES = {"num_local_experts": "num_experts"}
ARCHITECTURES = {
    "Qwen2MoeForCausalLM": Family(
        read=_read_qwen2,
        defaults={
            **DEFAULTS,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        gguf={"qwen2moe": partial(read_gguf.dense, normalized=False)},
        field_names=_FIELD_NAMES,
    ),
    "Qwen3MoeForCausalLM": Family(
        read=_read_qwen3,
        defaults={**DEFAULTS, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        gguf={"qwen3moe": _read_qwen3_gguf},
        field_names=_FIELD_NAMES,
    ),
}
