"""ArchConfig from the metadata of a GGUF file. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raylm.config.gguf_metadata import GGUFFile, read_gguf
from raylm.errors import ConfigError
from raylm.layers.rope_settings import RopeSettings
from raylm.models.arch import ArchConfig, DTypeName, LayerKind
from raylm.models.fields import Fields

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that holds the divisors of the rotary frequencies of Llama 3.1 and later."""

_DTYPES: dict[int, DTypeName] = {0: "float32", 1: "float16"}
_F32 = 0
_GEMMA_27B_LAYERS = 62
_GEMMA_PATTERN = 6
_GEMMA_LOCAL_THETA = 1e4


@dataclass(frozen=True, slots=True)
class _Family:
    """What a GGUF architecture is called here, and what it means beyond its metadata."""

    architecture: str
    qk_norm: bool = False
    is_gemma: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "qwen2": _Family("Qwen2ForCausalLM"),
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm=True),
    "gemma3": _Family("Gemma3ForCausalLM", qk_norm=True, is_gemma=True),
}


def read_gguf_arch(path: Path) -> ArchConfig:
    """The description of the model in a GGUF file. Raises ConfigError."""
    file = read_gguf(path)
    fields = Fields(file.metadata, str(path))
    name = fields.get("general.architecture")
    if name not in _FAMILIES:
        raise fields.error("general.architecture", name, ", ".join(_FAMILIES))
    family, prefix = _FAMILIES[str(name)], f"{name}."
    if fields.get(prefix + "expert_count"):
        raise fields.error(prefix + "expert_count", fields.get(prefix + "expert_count"), "0 (no mixture of experts)")
    tensors = {tensor.name: tensor for tensor in file.tensors}
    hidden_size, num_heads = (
        fields.integer(prefix + "embedding_length"),
        fields.integer(prefix + "attention.head_count"),
    )
    head_dim = fields.integer(prefix + "attention.key_length", hidden_size // num_heads)
    num_layers = fields.integer(prefix + "block_count")
    kinds, window = _layer_kinds(fields, prefix, family, num_layers)
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{path}: the tensor token_embd.weight is missing")
    scale_dim = hidden_size // num_heads if family.is_gemma and num_layers == _GEMMA_27B_LAYERS else head_dim
    return ArchConfig(
        architecture=family.architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer(prefix + "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer(prefix + "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position=fields.integer(prefix + "context_length"),
        norm="rms",
        norm_eps=fields.number(prefix + "attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if family.is_gemma else "silu",
        layer_kinds=kinds,
        sliding_window=window,
        ropes=_ropes(file, fields, prefix, family, head_dim),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=family.qk_norm,
        attention_scale=scale_dim**-0.5,
        attention_soft_cap=0.0,
        logits_soft_cap=fields.number(prefix + "final_logit_softcapping", 0.0),
        embedding_multiplier=hidden_size**0.5 if family.is_gemma else 1.0,
        norm_offset=0.0,
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields),
        dtype=_dtype(fields),
    )


def _layer_kinds(fields: Fields, prefix: str, family: _Family, num_layers: int) -> tuple[tuple[LayerKind, ...], int]:
    full: list[LayerKind] = ["full"]
    sliding: list[LayerKind] = ["sliding"]
    if fields.get(prefix + "attention.sliding_window") is None:
        return tuple(full * num_layers), 0
    window = fields.integer(prefix + "attention.sliding_window")
    if not family.is_gemma:
        return tuple(sliding * num_layers), window
    # The file may say how often a global layer comes; the Gemma 3 models have one in six.
    pattern = fields.integer(prefix + "attention.sliding_window_pattern", _GEMMA_PATTERN)
    kinds = [kind for layer in range(num_layers) for kind in (sliding if (layer + 1) % pattern else full)]
    return tuple(kinds), window


def _ropes(
    file: GGUFFile, fields: Fields, prefix: str, family: _Family, head_dim: int
) -> dict[LayerKind, RopeSettings]:
    rotated = fields.integer(prefix + "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise fields.error(prefix + "rope.dimension_count", rotated, f"the size of a head ({head_dim})")
    full = _rope(file, fields, prefix, head_dim)
    if not family.is_gemma:
        return {"full": full, "sliding": full}
    return {"full": full, "sliding": RopeSettings(fields.number(prefix + "rope.freq_base_swa", _GEMMA_LOCAL_THETA))}


def _rope(file: GGUFFile, fields: Fields, prefix: str, head_dim: int) -> RopeSettings:
    theta = fields.number(prefix + "rope.freq_base", 1e4)
    factors = _rope_factors(file, head_dim)
    if factors:
        return RopeSettings(theta, "factors", factors=factors)
    kind = fields.get(prefix + "rope.scaling.type")
    if kind is None and fields.get(prefix + "rope.scale_linear") is not None:
        return RopeSettings(theta, "linear", factor=fields.number(prefix + "rope.scale_linear"))
    if kind in (None, "none"):
        return RopeSettings(theta)
    if kind == "linear":
        return RopeSettings(theta, "linear", factor=fields.number(prefix + "rope.scaling.factor"))
    raise fields.error(prefix + "rope.scaling.type", kind, "none, linear")


def _rope_factors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            if tensor.type != _F32 or tensor.shape != (head_dim // 2,):
                raise ConfigError(
                    f"{file.path}: {ROPE_FACTORS} has type {tensor.type} and shape {tensor.shape}; "
                    f"allowed: F32 ({_F32}) and ({head_dim // 2},)"
                )
            factors = np.fromfile(file.path, dtype="<f4", count=head_dim // 2, offset=tensor.offset)
            return tuple(factors.tolist())
    return ()


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """End of text, of a turn and of a message: each ends a completion."""
    names = ("eos", "eot", "eom")
    ids = [token for name in names for token in fields.token_ids(f"tokenizer.ggml.{name}_token_id")]
    return tuple(dict.fromkeys(ids))


def _dtype(fields: Fields) -> DTypeName:
    kind = fields.get("general.file_type")
    return _DTYPES.get(kind, "bfloat16") if isinstance(kind, int) else "bfloat16"
