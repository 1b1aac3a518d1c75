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
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}


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


def _minicpm_fields(values: Values) -> Values:
    count, size = values["num_hidden_layers"], values["hidden_size"]
    return {
        "scale_emb": values["embedding_multiplier"],
        "scale_depth": values["residual_multiplier"] * count**0.5,
        "dim_model_base": size / values["logits_scaling"],
    }


KINDS = {
    "olmo2": Kind("olmo2", {}),
    "olmo3": Kind("olmo3", _SLIDING),
    "cohere": Kind("cohere", {"logit_scale": 0.25}),
    "cohere2": Kind("cohere2", {"logit_scale": 0.25, **_SLIDING}),
    "falcon": Kind("falcon", {**_NO_GROUPS, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "gpt_neox": Kind("gpt_neox", _NO_GROUPS),
    "gpt2": Kind("gpt2", {**_NO_GROUPS, "n_inner": 96}),
    "opt": Kind("opt", {**_NO_GROUPS, "ffn_dim": 96}),
    "nemotron": Kind("nemotron", {}),
    "glm": Kind("glm", {"attention_bias": True}),
    "glm4": Kind("glm4", {"attention_bias": True}),
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
    "baichuan": Kind("llama", {"num_key_value_heads": 4}, Stored("BaichuanForCausalLM", lambda values: {}, _baichuan)),
}
