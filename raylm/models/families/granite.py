"""Granite: a Llama with multipliers of embedding, scores, residual stream and logits."""

from __future__ import annotations

from dataclasses import replace

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.families.llama import read_llama
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import TensorNames


def read_granite(fields: Fields) -> ArchConfig:
    return replace(
        read_llama(fields),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )


def read_granite_gguf(header: read_gguf.Header) -> ArchConfig:
    """Of a mixture too. Raises ConfigError."""
    fields, prefix = header.fields, header.prefix
    return replace(
        read_gguf.dense(header, normalized=True),
        embedding_multiplier=fields.number(prefix + "embedding_scale", 1.0),
        attention_scale=fields.number(prefix + "attention.scale", 1.0),
        residual_multiplier=fields.number(prefix + "residual_scale", 1.0),
        logits_divisor=fields.number(prefix + "logit_scale", 1.0),
    )


ARCHITECTURES = {
    "GraniteForCausalLM": Family(
        read=read_granite,
        defaults={"max_position_embeddings": 2048},
        gguf={"granite": read_granite_gguf},
        names=TensorNames(gguf_pairs=True),
    )
}
