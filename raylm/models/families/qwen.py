"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values. Qwen3: these are normed head by head instead."""

from __future__ import annotations

from dataclasses import replace

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.read_folder import dense
from raylm.models.read_layers import LayerKind, named_kinds

DEFAULTS: dict[str, object] = {"max_position_embeddings": 32768, "sliding_window": 4096}


def read_qwen2(fields: Fields) -> ArchConfig:
    return replace(dense(fields, kinds=_kinds(fields)), qkv_bias=True)


def read_qwen3(fields: Fields) -> ArchConfig:
    biased = fields.flag("attention_bias", False)
    return replace(dense(fields, kinds=_kinds(fields)), qk_norm="head", qkv_bias=biased, o_bias=biased)


def _kinds(fields: Fields) -> list[LayerKind]:
    count = fields.integer("num_hidden_layers")
    if fields.get("sliding_window") is None or not fields.flag("use_sliding_window", False):
        return ["full"] * count
    if (named := named_kinds(fields)) is not None:
        return named
    first = fields.integer("max_window_layers", 28)
    return ["sliding" if layer >= first else "full" for layer in range(count)]


def _read_qwen3_gguf(header: read_gguf.Header) -> ArchConfig:
    return replace(read_gguf.dense(header), qk_norm="head")


ARCHITECTURES = {
    "Qwen2ForCausalLM": Family(read=read_qwen2, defaults=DEFAULTS, gguf={"qwen2": read_gguf.dense}),
    "Qwen3ForCausalLM": Family(
        read=read_qwen3, defaults={**DEFAULTS, "head_dim": 128}, gguf={"qwen3": _read_qwen3_gguf}
    ),
}
