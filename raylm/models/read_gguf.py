"""What the metadata of a GGUF file say of any model; raylm.models.families has what is a family's own.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from raylm.errors import ConfigError
from raylm.layers.rope_settings import RopeSettings
from raylm.model_files.gguf_header import GGUFFile, GGUFTensorInfo, read_gguf
from raylm.model_files.gguf_shards import shards
from raylm.models.arch import Activation, ArchConfig, DTypeName, ExpertsSpec, LayerSpec, MLPSpec
from raylm.models.fields import Fields
from raylm.models.read_layers import LayerKind, check_rope, repeated_kinds, yarn_mscale

_FACTORS, _LONG_FACTORS, _SHORT_FACTORS = ROPE_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
"""Tensors that hold divisors of rotary frequencies: those of Llama 3.1 and later, and of Phi-3 for long sequences and
short ones."""

_DTYPES: dict[int, DTypeName] = {0: "float32", 1: "float16"}
_F32 = 0
_OF_LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""What is the same for all layers here."""
_SOFTMAX = 1
_SCORES: dict[object, Literal["softmax", "sigmoid"]] = {_SOFTMAX: "softmax", 2: "sigmoid"}
"""By expert_gating_func."""


class Header(NamedTuple):
    """A GGUF file up to its tensors' data; of several shards the first one's metadata and all tensors."""

    files: list[GGUFFile]
    fields: Fields
    name: str
    """Of the architecture."""
    prefix: str
    """Of the architecture's keys."""
    tensors: dict[str, GGUFTensorInfo]


def open_header(path: Path, names: Sequence[str]) -> Header:
    """Raises ConfigError where the file is damaged or of an architecture that is not one of `names`."""
    files = [read_gguf(shard) for shard in shards(path)]
    fields = Fields(files[0].metadata, str(path))
    name = fields.get("general.architecture")
    if name not in names:
        raise fields.error("general.architecture", name, ", ".join(names))
    # Converters write a list of as many as there are layers where layers might differ.
    lists = {f"{name}.{key}": fields.get(f"{name}.{key}") for key in _OF_LAYERS}
    fields = fields.having(
        **{key: each[0] for key, each in lists.items() if isinstance(each, list) and len(set(each)) == 1}
    )
    tensors = {tensor.name: tensor for file in files for tensor in file.tensors}
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{path}: the tensor token_embd.weight is missing")
    return Header(files, fields, str(name), f"{name}.", tensors)


def dense(
    header: Header,
    *,
    kinds: Sequence[LayerKind] | None = None,
    ropes: dict[LayerKind, RopeSettings] | None = None,
    activation: Activation = "silu",
    normalized: bool | None = None,
) -> ArchConfig:
    """A Llama, as the keys that families share say, with biases where there are tensors of them.

    `kinds` are its layers' (default: all full, or all sliding), `ropes` those of rope_of where they are not given.
    `normalized`: whether the weights of a token's experts sum to 1; None of a family without experts.
    Raises ConfigError.
    """
    fields, prefix, tensors = header.fields, header.prefix, header.tensors
    head_dim, num_heads = head_dim_of(header), fields.integer(prefix + "attention.head_count")
    window = sliding_window(header)
    if kinds is None:
        kind: LayerKind = "sliding" if window else "full"
        kinds = [kind] * fields.integer(prefix + "block_count")
    if ropes is None:
        rope = rope_of(header, head_dim)
        check_rope(fields, rope, head_dim)
        ropes = {"full": rope, "sliding": rope}
    mlp = MLPSpec(
        size=fields.integer(prefix + "feed_forward_length"),
        activation=activation,
        bias="blk.0.ffn_up.bias" in tensors,
    )
    mlps: list[MLPSpec | ExpertsSpec] = [mlp] * len(kinds)
    if fields.get(prefix + "expert_count"):
        first = _count(header, "leading_dense_block_count")
        mlps[first:] = [_experts(header, mlp, normalized, layer=len(kinds) - 1)] * len(kinds[first:])
    return ArchConfig(
        architecture="",  # the registry names it
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=fields.integer(prefix + "embedding_length"),
        layers=tuple(
            LayerSpec(mlp=mlp, rope=ropes[kind], window=window if kind == "sliding" else 0)
            for mlp, kind in zip(mlps, kinds, strict=True)
        ),
        num_heads=num_heads,
        num_kv_heads=fields.integer(prefix + "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position=fields.integer(prefix + "context_length"),
        norm="rms",
        norm_eps=fields.number(prefix + "attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm=None,
        attention_scale=head_dim**-0.5,
        attention_soft_cap=0.0,
        logits_soft_cap=fields.number(prefix + "final_logit_softcapping", 0.0),
        embedding_multiplier=1.0,
        norm_offset=0.0,
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields),
        dtype=_dtype(fields),
    )


def _experts(header: Header, mlp: MLPSpec, normalized: bool | None, *, layer: int) -> ExpertsSpec:
    """Beside an `mlp` of other layers, with the biases and the shared expert that the layer's tensors have."""
    fields, prefix, tensors = header.fields, header.prefix, header.tensors
    count = fields.integer(prefix + "expert_count")
    if normalized is None:
        raise fields.error(prefix + "expert_count", count, "0 (no mixture of experts)")
    per_token = fields.integer(prefix + "expert_used_count")
    if not 1 <= per_token <= count:
        raise fields.error(prefix + "expert_used_count", per_token, f"1 to {prefix}expert_count, {count}")
    scores = fields.get(prefix + "expert_gating_func") or _SOFTMAX
    if scores not in _SCORES:
        raise fields.error(prefix + "expert_gating_func", scores, ", ".join(map(str, _SCORES)))
    at = f"blk.{layer}."
    shared = tensors.get(f"{at}ffn_up_shexp.weight")
    if shared is None and (num_shared := fields.get(prefix + "expert_shared_count")):
        raise fields.error(prefix + "expert_shared_count", num_shared, f"0 without {at}ffn_up_shexp.weight")
    return ExpertsSpec(
        num_experts=count,
        per_token=per_token,
        size=fields.integer(prefix + "expert_feed_forward_length", mlp.size),
        activation=mlp.activation,
        bias=f"{at}ffn_up_exps.bias" in tensors,
        router_bias=f"{at}ffn_gate_inp.bias" in tensors,
        scores=_SCORES[scores],
        normalized=fields.flag(prefix + "expert_weights_norm", normalized),
        # Some files have 0 for 1.
        scale=fields.number(prefix + "expert_weights_scale", 0.0) or 1.0,
        groups=_count(header, "expert_group_count") or 1,
        groups_per_token=_count(header, "expert_group_used_count") or 1,
        choice_bias=f"{at}exp_probs_b.bias" in tensors,
        shared=None if shared is None else replace(mlp, size=shared.shape[0], bias=False),
        shared_gate=f"{at}ffn_gate_inp_shexp.weight" in tensors,
    )


def _count(header: Header, name: str) -> int:
    """0 where the file does not say, or says so."""
    return header.fields.integer(header.prefix + name) if header.fields.get(header.prefix + name) else 0


def head_dim_of(header: Header) -> int:
    """Elements of a head. Raises ConfigError."""
    fields, prefix = header.fields, header.prefix
    even = fields.integer(prefix + "embedding_length") // fields.integer(prefix + "attention.head_count")
    return fields.integer(prefix + "attention.key_length", even)


def sliding_window(header: Header) -> int:
    """Tokens that a sliding layer sees; 0 where none slides. Raises ConfigError."""
    window = _count(header, "attention.sliding_window")
    return window if window < header.fields.integer(header.prefix + "context_length") else 0


def kinds_of(header: Header, usual: int) -> list[LayerKind]:
    """Which layers slide: as the file says, by a flag for each or by how many make a pattern, of which the last is
    full. There are `usual` where it does not say. Raises ConfigError."""
    fields, name = header.fields, header.prefix + "attention.sliding_window_pattern"
    count, given = fields.integer(header.prefix + "block_count"), fields.get(name)
    if not sliding_window(header):
        return ["full"] * count
    if not isinstance(given, list):
        return repeated_kinds(count, fields.integer(name, usual))
    if len(given) != count or not all(isinstance(slides, bool) for slides in given):
        raise fields.error(name, given, f"a positive integer, or {count} times true or false")
    return ["sliding" if slides else "full" for slides in given]


def rope_of(header: Header, head_dim: int) -> RopeSettings:
    """The rotary embedding of full layers. Raises ConfigError."""
    fields, prefix = header.fields, header.prefix
    rotated = fields.integer(prefix + "rope.dimension_count", head_dim)
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise fields.error(prefix + "rope.dimension_count", rotated, f"an even number up to a head's size, {head_dim}")
    theta = fields.number(prefix + "rope.freq_base", 1e4)
    # The next number above, since the size is rounded down.
    plain = RopeSettings(theta, partial_rotary_factor=min(1.0, math.nextafter(rotated / head_dim, 2)))
    if factors := _rope_factors(header.files, _FACTORS, rotated):
        return replace(plain, kind="factors", factors=factors)
    if factors := _rope_factors(header.files, _LONG_FACTORS, rotated):
        return replace(
            plain,
            kind="longrope",
            factors=factors,
            short_factors=_rope_factors(header.files, _SHORT_FACTORS, rotated),
            original_max_position=fields.integer(prefix + "rope.scaling.original_context_length"),
            attention_factor=fields.number(prefix + "rope.scaling.attn_factor", 1.0),
        )
    kind = fields.get(prefix + "rope.scaling.type")
    if kind is None and fields.get(prefix + "rope.scale_linear") is not None:
        return replace(plain, kind="linear", factor=fields.number(prefix + "rope.scale_linear"))
    if kind in (None, "none"):
        return plain
    if kind == "linear":
        return replace(plain, kind="linear", factor=fields.number(prefix + "rope.scaling.factor"))
    if kind == "yarn":
        return _yarn(header, plain)
    raise fields.error(prefix + "rope.scaling.type", kind, "none, linear, yarn")


def _yarn(header: Header, plain: RopeSettings) -> RopeSettings:
    fields, prefix = header.fields, header.prefix + "rope.scaling."
    factor = fields.number(prefix + "factor")
    rope = replace(
        plain,
        kind="yarn",
        factor=factor,
        original_max_position=fields.integer(prefix + "original_context_length"),
        beta_fast=fields.number(prefix + "yarn_beta_fast", 32.0),
        beta_slow=fields.number(prefix + "yarn_beta_slow", 1.0),
        # The one is what config.json calls attention_factor, the other multiplies what it is without.
        attention_factor=fields.number(
            prefix + "yarn_attn_factor", fields.number(prefix + "attn_factor", 1.0) * yarn_mscale(factor)
        ),
    )
    check_rope(fields, rope, head_dim_of(header))
    return rope


def _rope_factors(files: list[GGUFFile], name: str, rotated: int) -> tuple[float, ...]:
    """Those of a tensor; none where there is none of this name."""
    placed = [(shard, tensor) for shard in files for tensor in shard.tensors]
    for file, tensor in placed:
        if tensor.name == name:
            if tensor.type != _F32 or tensor.shape != (rotated // 2,):
                raise ConfigError(
                    f"{file.path}: {name} has type {tensor.type} and shape {tensor.shape}; "
                    f"allowed: F32 ({_F32}) and ({rotated // 2},)"
                )
            factors = np.fromfile(file.path, dtype="<f4", count=rotated // 2, offset=tensor.offset)
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
