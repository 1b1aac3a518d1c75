"""InternLM 2: a Llama with names of its own, whose queries, keys and values are one tensor. InternLM 1 and 3: a
Llama."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import MISTRAL_WEIGHTS, TensorNames
from raylm.models.read_folder import dense, mlp_of


def _read(fields: Fields) -> ArchConfig:
    biased = fields.flag("bias", False)
    return replace(dense(fields), qkv_bias=biased, o_bias=biased)


def _read_internlm3(fields: Fields) -> ArchConfig:
    biased = fields.flag("bias", fields.flag("mlp_bias", False))
    qkv_bias = fields.flag("qkv_bias", fields.flag("attention_bias", False))
    return replace(dense(fields, mlp=mlp_of(fields, bias=biased)), qkv_bias=qkv_bias, o_bias=biased)


_DEFAULTS: dict[str, object] = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
ARCHITECTURES = {
    "InternLMForCausalLM": Family(read=_read, defaults={**_DEFAULTS, "bias": True}),
    "InternLM2ForCausalLM": Family(
        read=_read,
        defaults=_DEFAULTS,
        names=TensorNames(
            folder={**MISTRAL_WEIGHTS, "wqkv": ("qkv_proj", None)},
            qkv_groups=True,
        ),
    ),
    "InternLM3ForCausalLM": Family(
        read=_read_internlm3, defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
    ),
}
