"""GLM-4.5: experts chosen by sigmoids behind some dense layers, beside one that all tokens go through; half of each
head rotated. DeepSeek-MoE, the first generation: a Llama with such layers, whose experts are chosen by softmax."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import GGUF_WEIGHTS, HF_WEIGHTS, TensorNames
from raylm.models.read_folder import dense, experts_of, mlp_of, with_experts
from raylm.models.read_layers import LayerKind

_SHARED = {**HF_WEIGHTS, "shared_experts": ("shared_expert", None)}


def _read(fields: Fields) -> ArchConfig:
    dense_layers = range(_count(fields, "first_k_dense_replace"))
    experts = replace(
        experts_of(fields),
        scores="sigmoid",
        choice_bias=True,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        groups_per_token=fields.integer("topk_group", 1),
        shared=replace(mlp_of(fields), size=_shared_size(fields)),
    )
    arch = replace(
        dense(fields),
        qk_norm="head" if fields.flag("use_qk_norm", False) else None,
        qkv_bias=fields.flag("attention_bias", False),
        unused_layers=_count(fields, "num_nextn_predict_layers"),
    )
    return with_experts(arch, experts, dense_layers=dense_layers)


def _read_deepseek(fields: Fields) -> ArchConfig:
    experts = experts_of(fields)
    if fields.get("n_shared_experts"):
        experts = replace(experts, shared=replace(mlp_of(fields), size=_shared_size(fields)))
    first, step = _count(fields, "first_k_dense_replace"), fields.integer("moe_layer_freq", 1)
    layers = range(fields.integer("num_hidden_layers"))
    biased = fields.flag("attention_bias", False)
    arch = replace(dense(fields), qkv_bias=biased, o_bias=biased)
    return with_experts(arch, experts, dense_layers=[layer for layer in layers if layer < first or layer % step])


def _read_gguf(header: read_gguf.Header) -> ArchConfig:
    fields, prefix = header.fields, header.prefix
    unused = _count(fields, prefix + "nextn_predict_layers")
    kinds: list[LayerKind] = ["full"] * (fields.integer(prefix + "block_count") - unused)
    normed = "blk.0.attn_q_norm.weight" in header.tensors
    arch = read_gguf.dense(header, kinds=kinds, normalized=True)
    return replace(arch, qk_norm="head" if normed else None, unused_layers=unused)


def _shared_size(fields: Fields) -> int:
    return fields.integer("n_shared_experts", 1) * fields.integer("moe_intermediate_size")


def _count(fields: Fields, name: str) -> int:
    return fields.integer(name) if fields.get(name) else 0


ARCHITECTURES = {
    "Glm4MoeForCausalLM": Family(
        read=_read,
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        field_names={"n_routed_experts": "num_experts"},
        gguf={"glm4moe": _read_gguf},
        names=TensorNames(
            folder=_SHARED,
            gguf={**GGUF_WEIGHTS, "post_attention_norm": ("post_attention_layernorm", None)},
        ),
    ),
    "DeepseekForCausalLM": Family(
        read=_read_deepseek,
        defaults={"max_position_embeddings": 2048, "moe_intermediate_size": 1407, "first_k_dense_replace": 0},
        field_names={"n_routed_experts": "num_experts"},
        gguf={"deepseek": partial(read_gguf.dense, normalized=False)},
        names=TensorNames(folder=_SHARED, gguf_pairs=True),
    ),
}
