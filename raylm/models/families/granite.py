"""Granite: a Llama with multipliers of embedding, scores, residual stream and logits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.families.llama import read_llama
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import TensorNames


def read_granite(fields: Fields, nope_layers: Collection[int] = ()) -> ArchConfig:
    """`nope_layers` as dense takes them. Raises ConfigError."""
    return replace(
        read_llama(fields, nope_layers),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0),
    )


def read_granite_gguf(header: read_gguf.Header) -> ArchConfig:
    """Of a mixture too. Raises ConfigError."""
    fields, prefix = header.fields, header.prefix
    arch = read_gguf.dense(header, normalized=True)
    if not fields.flag(prefix + "rope.scaling.finetuned", True):  # That is what a file without rotary embedding says.
        arch = replace(arch, layers=tuple(replace(layer, rope=None) for layer in arch.layers))
    return replace(
        arch,
        embedding_multiplier=fields.number(prefix + "embedding_scale", 1.0),
        attention_scale=fields.number(prefix + "attention.scale", arch.attention_scale),
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
