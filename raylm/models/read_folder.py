"""What config.json and generation_config.json say of any model; raylm.models.families has what is a family's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raylm.layers.rope_settings import RopeSettings
from raylm.models.arch import Activation, ArchConfig, DTypeName, ExpertsSpec, LayerSpec, MLPSpec
from raylm.models.fields import Fields
from raylm.models.read_json import read_json
from raylm.models.read_layers import LAYER_KINDS, LayerKind, check_rope, rope_of

_DTYPES: dict[str, DTypeName] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_GATED = ("silu", "gelu_tanh")
"""What gates: the operators know no others."""


def dense(
    fields: Fields,
    *,
    kinds: Sequence[LayerKind] | None = None,
    ropes: Mapping[LayerKind, RopeSettings] | None = None,
    mlp: MLPSpec | None = None,
    nope_layers: Collection[int] = (),
) -> ArchConfig:
    """A Llama without biases, as the fields that families share say; the registry adds its name and its end tokens.

    `kinds` are its layers' (default: all full), `ropes` and `mlp` those of rope_of and mlp_of where they are not given;
    `nope_layers` have no positional embedding, and no layer has where `ropes` are empty. Raises ConfigError.
    """
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_attention_heads", num_heads, f"a multiple of num_key_value_heads, {num_kv_heads}")
    kinds = kinds if kinds is not None else ["full"] * fields.integer("num_hidden_layers")
    if ropes is None:
        ropes = {kind: rope_of(fields, kind) for kind in LAYER_KINDS if kind in kinds}
    for rope in ropes.values():
        check_rope(fields, rope, head_dim)
    window = fields.integer("sliding_window") if "sliding" in kinds else 0
    mlp, max_position = mlp or mlp_of(fields), fields.integer("max_position_embeddings")
    max_position = max((rope.reach(max_position) for rope in ropes.values()), default=max_position)
    if window >= max_position:
        window = 0  # Phi-3 says so where nothing slides.
    return ArchConfig(
        architecture="",  # the registry names it
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(
            LayerSpec(
                mlp=mlp,
                rope=ropes[kind] if ropes and layer not in nope_layers else None,
                window=window if kind == "sliding" else 0,
            )
            for layer, kind in enumerate(kinds)
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=False,
        o_bias=False,
        qk_norm=None,
        attention_scale=head_dim**-0.5,
        attention_soft_cap=0.0,
        logits_soft_cap=0.0,
        embedding_multiplier=1.0,
        norm_offset=0.0,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=(),
        dtype=_dtype(fields),
    )


def mlp_of(
    fields: Fields, *, activation: str = "silu", name: str = "hidden_act", gated: bool = True, bias: bool = False
) -> MLPSpec:
    """The MLP of all layers: intermediate_size, and the activation that the field `name` says, `activation` where it is
    missing. Raises ConfigError."""
    given = fields.get(name) or activation
    found = _ACTIVATIONS.get(given) if isinstance(given, str) else None
    if found is None or (gated and found not in _GATED):
        allowed = [each for each, own in _ACTIVATIONS.items() if not gated or own in _GATED]
        raise fields.error(name, given, f"one of {', '.join(allowed)}")
    return MLPSpec(size=fields.integer("intermediate_size"), activation=found, gated=gated, bias=bias)


def with_experts(arch: ArchConfig, experts: ExpertsSpec, *, dense_layers: Collection[int] = ()) -> ArchConfig:
    """The model with experts in all layers but some."""
    layers = [
        layer if number in dense_layers else replace(layer, mlp=experts) for number, layer in enumerate(arch.layers)
    ]
    return replace(arch, layers=tuple(layers))


def experts_of(fields: Fields, *, size: str = "moe_intermediate_size", normalized: bool | None = None) -> ExpertsSpec:
    """Softmax over num_experts, of which num_experts_per_tok are taken; `size` is the field of their columns,
    `normalized` what norm_topk_prob says unless it is given. Raises ConfigError."""
    num_experts, per_token = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise fields.error("num_experts_per_tok", per_token, f"at most num_experts, {num_experts}")
    return ExpertsSpec(
        num_experts=num_experts,
        per_token=per_token,
        size=fields.integer(size),
        activation=mlp_of(fields).activation,
        normalized=fields.flag("norm_topk_prob", False) if normalized is None else normalized,
    )


def eos_token_ids(fields: Fields, folder: Path) -> tuple[int, ...]:
    """Those of config.json and of generation_config.json. Raises ConfigError."""
    ids = list(fields.token_ids("eos_token_id"))
    path = folder / "generation_config.json"
    if path.is_file():
        ids += Fields(read_json(path), str(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def refuse_unsupported(fields: Fields) -> None:
    """Raises ConfigError for what no family can be."""
    for name in ("use_bidirectional_attention", "apply_residual_connection_post_layernorm"):
        if fields.get(name):
            raise fields.error(name, True, "false")


def _dtype(fields: Fields) -> DTypeName:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name) or "float32"
    if value not in _DTYPES:
        raise fields.error(name, value, ", ".join(_DTYPES))
    return _DTYPES[str(value)]
