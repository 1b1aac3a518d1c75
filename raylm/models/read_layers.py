"""How config.json says which layers slide, and how each kind of layer knows positions.

Both spellings of the rotary settings are read: rope_theta and rope_scaling (transformers 4), and rope_parameters, which
may have a section for each kind of layer (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from raylm.layers.rope_settings import RopeKind, RopeSettings
from raylm.models.fields import MOST_POSITIONS, Fields

LayerKind = Literal["full", "sliding"]
"""Whether attention sees everything or a sliding window."""
LAYER_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
_LAYER_TYPES: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}
_TYPES = {kind: name for name, kind in _LAYER_TYPES.items()}
_QUERY_BETA = "llama_4_scaling_beta"
_SHARE = "partial_rotary_factor"


def named_kinds(fields: Fields) -> list[LayerKind] | None:
    """The kind of each layer as layer_types says; None where it is not there. Raises ConfigError."""
    names, count = fields.get("layer_types"), fields.integer("num_hidden_layers")
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != count or not set(names) <= set(_LAYER_TYPES):
        raise fields.error("layer_types", names, f"{count} names, each one of {', '.join(_LAYER_TYPES)}")
    return [_LAYER_TYPES[name] for name in names]


def uniform_kinds(fields: Fields) -> list[LayerKind]:
    """All layers slide where there is a window. Raises ConfigError."""
    kind: LayerKind = "full" if fields.get("sliding_window") is None else "sliding"
    return [kind] * fields.integer("num_hidden_layers")


def repeated_kinds(count: int, pattern: int) -> list[LayerKind]:
    """Of `pattern` layers the last one is full, the others slide."""
    return ["sliding" if (layer + 1) % pattern else "full" for layer in range(count)]


def rope_of(fields: Fields, kind: LayerKind, *, theta: float | None = None, is_scaled: bool = True) -> RopeSettings:
    """The rotary embedding of one kind of layer. `theta` stands for rope_theta; without `is_scaled`, rope_scaling is
    for layers of other kinds. Raises ConfigError."""
    parameters = fields.section("rope_parameters")
    if parameters.get(_TYPES[kind]) is not None:
        section = parameters.section(_TYPES[kind])
    elif fields.get("rope_parameters") is not None or not is_scaled:
        section = parameters
    else:
        section = fields.section("rope_scaling")
    given = fields.number("rope_theta", 1e4) if theta is None else theta
    share = section.number(_SHARE, fields.number(_SHARE, 1.0))
    if share > 1:
        raise section.error(_SHARE, share, "at most 1")
    name = "rope_type" if section.get("rope_type") is not None else "type"
    method = section.get(name) or "default"
    if not isinstance(method, str) or method not in _READERS:
        raise section.error(name, method, f"one of {', '.join(_READERS)}")
    plain = RopeSettings(section.number("rope_theta", given), _READERS[method][0], partial_rotary_factor=share)
    rope = _READERS[method][1](plain, section, fields)
    if section.get(_QUERY_BETA) is None:
        return rope
    return replace(rope, query_beta=section.number(_QUERY_BETA, 0.0), original_max_position=_original(section, fields))


def check_rope(fields: Fields, rope: RopeSettings, head_dim: int) -> None:
    """Raises ConfigError where heads of `head_dim` cannot be rotated so, or it is for more positions than a model may
    have."""
    size = rope.size(head_dim)
    if size < 2 or size % 2:
        raise fields.error(_SHARE, rope.partial_rotary_factor, f"a share of the {head_dim} dimensions that is even")
    if rope.kind == "yarn" and rope.theta <= 1:
        raise fields.error("rope_theta", rope.theta, "more than 1, with YaRN")
    if rope.reach(1) > MOST_POSITIONS:
        most = f"at most {MOST_POSITIONS} / original_max_position_embeddings, {rope.original_max_position}"
        raise fields.error("rope_scaling.factor", rope.factor, most)
    for name, factors in (("long_factor", rope.factors), ("short_factor", rope.short_factors)):
        if rope.kind == "longrope" and len(factors) != size // 2:
            raise fields.error(name, list(factors), f"{size // 2} positive numbers, one for two dimensions of a head")


def _default(plain: RopeSettings, section: Fields, fields: Fields) -> RopeSettings:
    return plain


def _linear(plain: RopeSettings, section: Fields, fields: Fields) -> RopeSettings:
    return replace(plain, factor=section.number("factor"))


def _llama3(plain: RopeSettings, section: Fields, fields: Fields) -> RopeSettings:
    return replace(
        plain,
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position=_original(section, fields),
    )


def _yarn(plain: RopeSettings, section: Fields, fields: Fields) -> RopeSettings:
    factor = section.number("factor", _stretch(section, fields))
    whole, all_dims = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    usual = yarn_mscale(factor, whole) / yarn_mscale(factor, all_dims) if whole and all_dims else yarn_mscale(factor)
    return replace(
        plain,
        factor=factor,
        original_max_position=_original(section, fields),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
        attention_factor=section.number("attention_factor", usual),
    )


def _longrope(plain: RopeSettings, section: Fields, fields: Fields) -> RopeSettings:
    original, factor = _original(section, fields), section.number("factor", _stretch(section, fields))
    if original < 2:
        raise section.error("original_max_position_embeddings", original, "at least 2")
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    attention_factor = section.number("attention_factor", usual)
    # Phi-MoE has one of its own for long sequences, and one for short ones.
    short = section.number("short_mscale") if section.get("short_mscale") is not None else None
    return replace(
        plain,
        factor=factor,
        original_max_position=original,
        factors=section.numbers("long_factor"),
        short_factors=section.numbers("short_factor"),
        attention_factor=section.number("long_mscale", attention_factor),
        short_attention_factor=short,
    )


def _dynamic(plain: RopeSettings, section: Fields, fields: Fields) -> RopeSettings:
    original = fields.integer("max_position_embeddings")
    return replace(plain, factor=section.number("factor"), original_max_position=original)


def _original(section: Fields, fields: Fields) -> int:
    """Tokens of a sequence at most before the model was stretched."""
    name = "original_max_position_embeddings"
    return section.integer(name, fields.integer(name, fields.integer("max_position_embeddings")))


def _stretch(section: Fields, fields: Fields) -> float:
    return fields.integer("max_position_embeddings") / _original(section, fields)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by (arXiv:2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


_Reader = Callable[[RopeSettings, Fields, Fields], RopeSettings]
"""Takes what all kinds have, the section of the rotary settings and all fields."""
_READERS: dict[str, tuple[RopeKind, _Reader]] = {
    "default": ("default", _default),
    "linear": ("linear", _linear),
    "llama3": ("llama3", _llama3),
    "yarn": ("yarn", _yarn),
    "longrope": ("longrope", _longrope),
    "su": ("longrope", _longrope),  # Phi-3's first checkpoints.
    "dynamic": ("dynamic", _dynamic),
}
