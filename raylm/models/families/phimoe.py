"""Phi-MoE: two experts of each layer chosen by SparseMixer, layer norms, a head with a bias."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import MIXTRAL_WEIGHTS, TensorNames
from raylm.models.read_folder import dense, experts_of, with_experts
from raylm.models.read_layers import uniform_kinds

_CHOSEN = 2


def _read(fields: Fields) -> ArchConfig:
    experts = replace(
        experts_of(fields, size="intermediate_size", normalized=False),
        scores="sparse_mixer",
        jitter=fields.number("router_jitter_noise", 0.01),
    )
    if experts.per_token != _CHOSEN:
        raise fields.error("num_experts_per_tok", experts.per_token, f"{_CHOSEN}: SparseMixer chooses as many")
    biased, tied = fields.flag("attention_bias", False), fields.flag("tie_word_embeddings", False)
    has_head_bias = fields.flag("lm_head_bias", False)
    if tied and has_head_bias:
        raise fields.error("lm_head_bias", True, "false where tie_word_embeddings is true")
    arch = replace(
        dense(fields, kinds=uniform_kinds(fields)),
        norm="layer",
        norm_eps=fields.number("rms_norm_eps"),
        qkv_bias=biased,
        o_bias=biased,
        head_bias=has_head_bias,
    )
    return with_experts(arch, experts)


ARCHITECTURES = {
    "PhimoeForCausalLM": Family(
        read=_read,
        defaults={
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 16,
            "num_experts_per_tok": 2,
        },
        field_names={"num_local_experts": "num_experts"},
        names=TensorNames(folder=MIXTRAL_WEIGHTS),
    ),
}
# Microsoft's own name for it.
ARCHITECTURES["PhiMoEForCausalLM"] = ARCHITECTURES["PhimoeForCausalLM"]
