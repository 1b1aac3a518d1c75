"""MiniCPM: a Llama with multipliers of embedding, residual stream and logits."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.families.llama import read_llama
from raylm.models.family import Family
from raylm.models.fields import Fields


def _read(fields: Fields) -> ArchConfig:
    if experts := fields.get("num_experts"):
        raise fields.error("num_experts", experts, "0 (no mixture of experts)")
    arch = read_llama(fields)
    return replace(
        arch,
        embedding_multiplier=fields.number("scale_emb", 1.0),
        residual_multiplier=fields.number("scale_depth", 1.0) / arch.num_layers**0.5,
        logits_divisor=arch.hidden_size / fields.number("dim_model_base", arch.hidden_size),
    )


ARCHITECTURES = {
    "MiniCPMForCausalLM": Family(read=_read, defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True})
}
