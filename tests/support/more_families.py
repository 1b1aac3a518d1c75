"""Families whose random checkpoints need no function of their own, for tests.support.checkpoints: a model_type of
transformers and what it has beside the usual sizes, or a model of another family that is stored in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Values = dict[str, object]
LEFT_OUT = object()
"""A field that this configuration has not."""
_NO_GROUPS = {"num_key_value_heads": LEFT_OUT, "head_dim": LEFT_OUT}
_EXPERTS: Values = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: Values = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}


class Always(torch.nn.Module):
    """Gives the same for every row."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def forward(self, x: Tensor) -> Tensor:
        return x.new_full((*x.shape[:-1], 1), self._value)


class Stored(NamedTuple):
    """How a family stores what transformers has under another name."""

    architecture: str
    fields: Callable[[Values], Values]
    """Those of config.json that differ."""
    tensors: Callable[[Tensors, Values], Tensors]


class Kind(NamedTuple):
    """`model_type` and `fields` of transformers."""

    model_type: str
    fields: Values
    stored: Stored | None = None


def _renamed(names: dict[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return rename


def _as_they_are(tensors: Tensors, values: Values) -> Tensors:
    return tensors


def _internlm2(tensors: Tensors, values: Values) -> Tensors:
    rename = _renamed(
        {
            "embed_tokens": "tok_embeddings",
            "self_attn.o_proj": "attention.wo",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "lm_head": "output",
        }
    )
    stored = {rename(name): tensor for name, tensor in tensors.items() if "self_attn" not in name or "o_proj" in name}
    groups = values["num_key_value_heads"]
    for name in [name for name in tensors if "q_proj" in name]:
        parts = [tensors[name.replace("q_proj", f"{part}_proj")].unflatten(0, (groups, -1)) for part in "qkv"]
        stored[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(parts, dim=1).flatten(0, 1)
    return stored


def _baichuan(tensors: Tensors, values: Values) -> Tensors:
    stored = {name: tensor for name, tensor in tensors.items() if "self_attn" not in name or "o_proj" in name}
    for name in [name for name in tensors if "q_proj" in name]:
        parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        stored[name.replace("q_proj", "W_pack")] = torch.cat(parts)
    return stored


def _chatglm(tensors: Tensors, values: Values) -> Tensors:
    rename = _renamed(
        {
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.layers": "transformer.encoder.layers",
            "model.norm": "transformer.encoder.final_layernorm",
            "lm_head": "transformer.output_layer",
            "self_attn.o_proj": "self_attention.dense",
            "mlp.gate_up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        }
    )
    stored = {rename(name): tensor for name, tensor in tensors.items() if "self_attn" not in name or "o_proj" in name}
    for name in [name for name in tensors if "q_proj" in name]:
        parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        stored[rename(name).replace("self_attn.q_proj", "self_attention.query_key_value")] = torch.cat(parts)
    return stored


def _chatglm_fields(values: Values) -> Values:
    names = {
        "num_hidden_layers": "num_layers",
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "head_dim": "kv_channels",
        "rms_norm_eps": "layernorm_epsilon",
        "max_position_embeddings": "seq_length",
        "num_key_value_heads": "multi_query_group_num",
    }
    own = {own: values[name] for name, own in names.items()} | dict.fromkeys(names)
    return own | {"multi_query_attention": True, "add_qkv_bias": True, "rope_ratio": 1, "rope_parameters": None}


def _minicpm_fields(values: Values) -> Values:
    count, size = values["num_hidden_layers"], values["hidden_size"]
    return {
        "scale_emb": values["embedding_multiplier"],
        "scale_depth": values["residual_multiplier"] * count**0.5,
        "dim_model_base": size / values["logits_scaling"],
    }


def _deepseek_fields(values: Values) -> Values:
    return {"n_routed_experts": values["num_experts"], "n_shared_experts": 2}


def _deepseek(tensors: Tensors, values: Values) -> Tensors:
    kept = {name: tensor for name, tensor in tensors.items() if "shared_expert_gate" not in name}
    return {name.replace("shared_expert.", "shared_experts."): tensor for name, tensor in kept.items()}


_DEEPSEEK = Stored("DeepseekForCausalLM", _deepseek_fields, _deepseek)
KINDS = {
    "olmo2": Kind("olmo2", {}),
    "olmo3": Kind("olmo3", _SLIDING),
    "cohere": Kind("cohere", {"logit_scale": 0.25}),
    "cohere2": Kind("cohere2", {"logit_scale": 0.25, **_SLIDING}),
    "falcon": Kind("falcon", {**_NO_GROUPS, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "gpt_neox": Kind("gpt_neox", _NO_GROUPS),
    "gpt2": Kind("gpt2", {**_NO_GROUPS, "n_inner": 96}),
    "opt": Kind("opt", {**_NO_GROUPS, "ffn_dim": 96}),
    "opt_350m": Kind("opt", {**_NO_GROUPS, "ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "nemotron": Kind("nemotron", {}),
    "glm": Kind("glm", {"attention_bias": True}),
    "glm4": Kind("glm4", {"attention_bias": True}),
    "chatglm": Kind("glm", {"attention_bias": True}, Stored("ChatGLMModel", _chatglm_fields, _chatglm)),
    "internlm2": Kind("llama", {}, Stored("InternLM2ForCausalLM", lambda values: {"bias": False}, _internlm2)),
    "internlm3": Kind(
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        Stored("InternLM3ForCausalLM", lambda values: {"qkv_bias": True, "bias": True}, _as_they_are),
    ),
    "minicpm": Kind(
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.25, "logits_scaling": 4.0},
        Stored("MiniCPMForCausalLM", _minicpm_fields, _as_they_are),
    ),
    "mixtral": Kind("mixtral", {"num_local_experts": 6}),
    "qwen2_moe": Kind("qwen2_moe", {**_EXPERTS, "head_dim": LEFT_OUT, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": Kind("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}),
    "olmoe": Kind("olmoe", {**_EXPERTS, "head_dim": LEFT_OUT, "intermediate_size": 32}),
    "granitemoe": Kind(
        "granitemoe",
        {"num_local_experts": 6, "head_dim": LEFT_OUT, "residual_multiplier": 0.3, "attention_multiplier": 0.2},
    ),
    "glm4_moe": Kind(
        "glm4_moe",
        {**_ROUTED, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "attention_bias": True},
    ),
    "deepseek": Kind(
        "qwen2_moe",
        {**_EXPERTS, "head_dim": LEFT_OUT, "qkv_bias": False, "shared_expert_intermediate_size": 64},
        _DEEPSEEK,
    ),
    "gpt_oss": Kind(
        "gpt_oss",
        # A limit that cuts off many numbers.
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "phimoe": Kind(
        "phimoe",
        # So many logits are near the best one that the weights are not all 1.
        {"num_local_experts": 6, "router_jitter_noise": 0.3, "attention_bias": True, "lm_head_bias": True},
    ),
    "baichuan": Kind("llama", {"num_key_value_heads": 4}, Stored("BaichuanForCausalLM", lambda values: {}, _baichuan)),
}
