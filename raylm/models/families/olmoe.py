"""OLMoE: a Llama with experts, and norms over all heads of queries and keys together."""

from __future__ import annotations

from dataclasses import replace

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.read_folder import dense, experts_of, with_experts


def _read(fields: Fields) -> ArchConfig:
    if fields.get("clip_qkv") is not None:
        raise fields.error("clip_qkv", fields.get("clip_qkv"), "null")
    biased = fields.flag("attention_bias", False)
    arch = replace(dense(fields), qk_norm="all_heads", qkv_bias=biased, o_bias=biased)
    return with_experts(arch, experts_of(fields, size="intermediate_size"))


def _read_gguf(header: read_gguf.Header) -> ArchConfig:
    return replace(read_gguf.dense(header, normalized=False), qk_norm="all_heads")


ARCHITECTURES = {
    "OlmoeForCausalLM": Family(
        read=_read,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "eos_token_id": 50279,
        },
        gguf={"olmoe": _read_gguf},
    )
}
