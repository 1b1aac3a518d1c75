"""What GGUF files of mixtures of experts, and of some others, have of their own, as llama.cpp's converters write it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType
from torch import Tensor

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
}
"""By model_type of transformers; others are called alike."""
PAIRED = ("llama", "smollm3", "granite", "granitemoe", "deepseek")
"""Those whose rotary dimensions are in pairs."""
NORM_BEHIND_ATTENTION = ("gemma2", "gemma3_text", "olmo2", "olmo3", "glm4_moe", "gpt_oss")
"""By model_type, those that have such a norm, or call the one before the experts so."""
PARTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"{block}.{name}.{part}_proj": f"ffn_{part}_{end}"
        for block, name, end in (
            ("mlp", "experts", "exps"),
            ("block_sparse_moe", "experts", "exps"),
            ("mlp", "shared_expert", "shexp"),
            ("mlp", "shared_experts", "shexp"),
        )
        for part in ("gate", "up", "down")
    },
}
PHI3_PARTS = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
GLM4_PARTS = {
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
WHOLE = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
"""With what stands behind the last dot."""


_DRAWN = {
    GGMLType.Q2_K: ((80, 2e-3), (82, 4e-4)),
    GGMLType.Q3_K: ((108, 5e-4),),
    GGMLType.Q4_K: ((0, 1e-4), (2, 8e-4)),
    GGMLType.Q5_K: ((0, 5e-5), (2, 8e-4)),
    GGMLType.Q6_K: ((208, 2e-5),),
    GGMLType.IQ3_S: ((0, 1e-4),),
    GGMLType.IQ4_NL: ((0, 5e-4),),
    GGMLType.IQ4_XS: ((0, 3e-5),),
}
"""Of types that the gguf package cannot write: at which bytes of a block its scales of 16 bits are, and what they are
about, so that numbers are those of a model."""


def quantize(values: np.ndarray, kind: GGMLType) -> np.ndarray:
    """In blocks; random ones of a type that the gguf package cannot write."""
    if kind not in _DRAWN:
        return gguf.quantize(values, kind)
    random = np.random.default_rng(values.size + kind.value)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    *rows, columns = values.shape
    blocks = random.integers(0, 256, (*rows, columns // size, num_bytes), dtype=np.uint8)
    for place, scale in _DRAWN[kind]:
        drawn = random.uniform(0.7, 1.3, (*blocks.shape[:-1], 1)) * scale
        blocks[..., place : place + 2] = drawn.astype(np.float16).view(np.uint8)
    return blocks.reshape(*rows, -1)


def without_fused_experts(tensors: Mapping[str, Tensor], model_type: str) -> Iterator[tuple[str, Tensor]]:
    """Gate and up of experts each by itself; all weights as [out, in]."""
    turns = model_type == "gpt_oss"
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "gate_up_proj_bias"):
            parameter = "bias" if last.endswith("bias") else "weight"
            halves = (tensor[..., ::2], tensor[..., 1::2]) if turns else tensor.chunk(2, dim=1)
            for part, half in zip(("gate", "up"), halves, strict=True):
                yield f"{path}.{part}_proj.{parameter}", half.mT if turns and half.ndim == 3 else half
        elif last in ("down_proj", "down_proj_bias") and path.endswith("experts"):
            parameter = "bias" if last.endswith("bias") else "weight"
            yield f"{path}.down_proj.{parameter}", tensor.mT if turns and tensor.ndim == 3 else tensor
        else:
            yield name, tensor


def write_fields(writer: gguf.GGUFWriter, config: object) -> None:
    """Of a mixture, and of a Granite."""
    kind = config.model_type
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    if count := next((getattr(config, name) for name in names if hasattr(config, name)), None):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if kind.startswith("granite"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind == "gpt_oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if kind == "phi3":
        rope = config.rope_parameters
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        if "long_factor" in rope:
            stretch = config.max_position_embeddings / config.original_max_position_embeddings
            factor = math.sqrt(1 + math.log(stretch) / math.log(config.original_max_position_embeddings))
            writer.add_rope_scaling_attn_factors(factor)
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if kind.startswith("glm4"):
        writer.add_rope_dimension_count(config.head_dim // 2)
    if kind == "glm4_moe":
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def write_prediction_layer(writer: gguf.GGUFWriter, number: int) -> None:
    """A layer behind the others that predicts one token more, which raylm does not load: a part of it."""
    writer.add_tensor(f"blk.{number}.nextn.eh_proj.weight", torch.zeros(8, 16).numpy())
    writer.add_tensor(f"blk.{number}.attn_norm.weight", torch.zeros(8).numpy())
