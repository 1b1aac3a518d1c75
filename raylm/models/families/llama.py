"""Llama, and models of its shape (SmolLM2, TinyLlama, Yi ...)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import GGUF_WEIGHTS, TensorNames, WeightTable
from raylm.models.read_folder import dense, mlp_of


def read_llama(fields: Fields, nope_layers: Collection[int] = ()) -> ArchConfig:
    """With biases where config.json says so; `nope_layers` as dense takes them. Raises ConfigError."""
    biased = fields.flag("attention_bias", False)
    mlp = mlp_of(fields, bias=fields.flag("mlp_bias", False))
    return replace(dense(fields, mlp=mlp, nope_layers=nope_layers), qkv_bias=biased, o_bias=biased)


_FIRST_MIXTRALS: WeightTable = {
    f"ffn_{part}.{number}": (f"mlp.experts.{number}.{projection}", shard)
    for number in range(8)
    for part, projection, shard in (
        ("gate", "gate_up_proj", "gate"),
        ("up", "gate_up_proj", "up"),
        ("down", "down_proj", None),
    )
}
"""Their files have each expert by itself."""
ARCHITECTURES = {
    "LlamaForCausalLM": Family(
        read=read_llama,
        defaults={"max_position_embeddings": 2048},
        # A Mixtral is a Llama there, with experts.
        gguf={"llama": partial(read_gguf.dense, normalized=True)},
        names=TensorNames(gguf={**GGUF_WEIGHTS, **_FIRST_MIXTRALS}, gguf_pairs=True),
    )
}
# Conversions of the first Llama say so.
ARCHITECTURES["LLaMAForCausalLM"] = replace(ARCHITECTURES["LlamaForCausalLM"], gguf={})
