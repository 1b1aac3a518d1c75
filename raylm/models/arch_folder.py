"""ArchConfig from a folder's config.json and generation_config.json.

Both spellings of the rotary settings are read: rope_theta and rope_scaling (transformers 4), and rope_parameters, which
may have a section for each kind of layer (transformers 5).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from raylm.errors import ConfigError
from raylm.layers.rope_settings import RopeSettings
from raylm.models.arch import Activation, ArchConfig, DTypeName, LayerKind
from raylm.models.fields import Fields

_LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}
_DTYPES: dict[str, DTypeName] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture means beyond the fields of its config.json. `defaults` are what a missing field stands
    for: checkpoints may leave out what equals their family's defaults."""

    qkv_bias: bool | None = False
    """None: as the field attention_bias says; so does the output projection then."""
    mlp_bias: bool = False
    """Whether the field mlp_bias is known."""
    qk_norm: bool = False
    is_gemma: bool = False
    is_bloom: bool = False
    has_mtp: bool = False
    """Whether the field num_nextn_predict_layers is known."""
    defaults: dict[str, object] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """This family's own names of fields -> what others call them."""


_GEMMA3 = _Family(
    qkv_bias=None,
    qk_norm=True,
    is_gemma=True,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
)
_BLOOM = _Family(
    qkv_bias=True,
    is_bloom=True,
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        # What the published models were trained for; the biases themselves know no limit.
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    names={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "layer_norm_epsilon": "rms_norm_eps",
        "seq_length": "max_position_embeddings",
    },
)
_LIKE_QWEN = ("Qwen", "MiMo")
_QWEN: dict[str, object] = {"max_position_embeddings": 32768, "sliding_window": 4096}
_FAMILIES = {
    "LlamaForCausalLM": _Family(qkv_bias=None, mlp_bias=True, defaults={"max_position_embeddings": 2048}),
    "MistralForCausalLM": _Family(defaults={"max_position_embeddings": 131072, "sliding_window": 4096}),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, defaults=_QWEN),
    "Qwen3ForCausalLM": _Family(qkv_bias=None, qk_norm=True, defaults={**_QWEN, "head_dim": 128}),
    "MiMoForCausalLM": _Family(qkv_bias=True, has_mtp=True, defaults=_QWEN),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "BloomForCausalLM": _BLOOM,
}


def read_folder_arch(folder: Path, architecture: str | None = None) -> ArchConfig:
    """The description of the model in a folder, read as `architecture` or as what config.json names.

    Raises ConfigError.
    """
    path = folder / "config.json"
    values = read_json(path)
    architecture = architecture or _architecture(values, path)
    family = _FAMILIES[architecture]
    if isinstance(text := values.get("text_config"), dict):
        values = {**values, **{name: value for name, value in text.items() if value is not None}}
    values |= {name: values[own] for own, name in family.names.items() if values.get(own) is not None}
    fields = Fields(values, str(path), family.defaults)
    _refuse_unsupported(fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_attention_heads", num_heads, f"a multiple of num_key_value_heads, {num_kv_heads}")
    biased = fields.flag("attention_bias", False) if family.qkv_bias is None else family.is_bloom
    kinds, window = _layer_kinds(fields, architecture)
    return ArchConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size if family.is_bloom else fields.integer("intermediate_size"),
        num_layers=len(kinds),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=fields.integer("max_position_embeddings"),
        norm="layer" if family.is_bloom else "rms",
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, family),
        layer_kinds=kinds,
        sliding_window=window,
        ropes=_ropes(fields, family, kinds),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=biased or bool(family.qkv_bias),
        o_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False) if family.mlp_bias else family.is_bloom,
        qk_norm=family.qk_norm,
        attention_scale=(fields.number("query_pre_attn_scalar") if family.is_gemma else head_dim) ** -0.5,
        attention_soft_cap=fields.number("attn_logit_softcapping", 0.0) if family.is_gemma else 0.0,
        logits_soft_cap=fields.number("final_logit_softcapping", 0.0) if family.is_gemma else 0.0,
        embedding_multiplier=hidden_size**0.5 if family.is_gemma else 1.0,
        norm_offset=1.0 if family.is_gemma else 0.0,
        mtp_layers=_mtp_layers(fields) if family.has_mtp else 0,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, folder),
        dtype=_dtype(fields),
    )


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises ConfigError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this file: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object, not {type(values).__name__}")
    return values


def _architecture(values: dict[str, object], path: Path) -> str:
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in _FAMILIES:
        raise ConfigError(f"{path}: architectures is {names!r}; allowed: one of {', '.join(_FAMILIES)}")
    return str(name)


def _refuse_unsupported(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        method = fields.section("quantization_config").get("quant_method")
        raise fields.error(
            "quantization_config.quant_method", method, "none (weights of 16 or 32 bits), or a .gguf file"
        )
    for name in ("use_bidirectional_attention", "apply_residual_connection_post_layernorm"):
        if fields.get(name):
            raise fields.error(name, True, "false")


def _mtp_layers(fields: Fields) -> int:
    return fields.integer("num_nextn_predict_layers") if fields.get("num_nextn_predict_layers") else 0


def _layer_kinds(fields: Fields, architecture: str) -> tuple[tuple[LayerKind, ...], int]:
    """The kind of every layer, and the window of the sliding ones (0 where there are none)."""
    count = fields.integer("num_hidden_layers")
    kinds: list[LayerKind] = ["full"] * count
    if architecture == "LlamaForCausalLM" or fields.get("sliding_window") is None:
        return tuple(kinds), 0
    if architecture.startswith(_LIKE_QWEN) and not fields.flag("use_sliding_window", False):
        return tuple(kinds), 0
    names = fields.get("layer_types")
    if architecture == "MistralForCausalLM":
        kinds = ["sliding"] * count
    elif names is not None:
        if not isinstance(names, list) or len(names) != count or not set(names) <= set(_LAYER_KINDS):
            raise fields.error("layer_types", names, f"{count} names, each one of {', '.join(_LAYER_KINDS)}")
        kinds = [_LAYER_KINDS[name] for name in names]
    elif architecture.startswith(_LIKE_QWEN):
        first = fields.integer("max_window_layers", 28)
        kinds = ["sliding" if layer >= first else "full" for layer in range(count)]
    else:
        pattern = fields.integer("sliding_window_pattern")
        kinds = ["sliding" if (layer + 1) % pattern else "full" for layer in range(count)]
    return tuple(kinds), fields.integer("sliding_window") if "sliding" in kinds else 0


def _ropes(fields: Fields, family: _Family, kinds: tuple[LayerKind, ...]) -> dict[LayerKind, RopeSettings]:
    ropes: dict[LayerKind, RopeSettings] = {}
    if family.is_bloom:
        return ropes
    max_position = fields.integer("max_position_embeddings")
    for name, kind in _LAYER_KINDS.items():
        if kind in kinds:
            is_local = family.is_gemma and kind == "sliding"
            theta = fields.number("rope_local_base_freq") if is_local else fields.number("rope_theta", 1e4)
            ropes[kind] = _rope(_rope_section(fields, family, name), theta, max_position)
    return ropes


def _rope_section(fields: Fields, family: _Family, layer_type: str) -> Fields:
    """The fields that hold the rotary settings of one kind of layer, in whichever spelling."""
    parameters = fields.section("rope_parameters")
    if parameters.get(layer_type) is not None:
        return parameters.section(layer_type)
    if fields.get("rope_parameters") is not None:
        return parameters
    # Only the global layers of a Gemma were stretched to longer texts.
    is_local = family.is_gemma and layer_type == "sliding_attention"
    return parameters if is_local else fields.section("rope_scaling")


def _rope(section: Fields, theta: float, max_position: int) -> RopeSettings:
    theta = section.number("rope_theta", theta)
    if section.number("partial_rotary_factor", 1.0) != 1.0:
        raise section.error("partial_rotary_factor", section.get("partial_rotary_factor"), "1.0")
    name = "rope_type" if section.get("rope_type") is not None else "type"
    kind = section.get(name)
    if kind in (None, "default"):
        return RopeSettings(theta)
    if kind == "linear":
        return RopeSettings(theta, "linear", factor=section.number("factor"))
    if kind == "llama3":
        return RopeSettings(
            theta,
            "llama3",
            factor=section.number("factor"),
            low_freq_factor=section.number("low_freq_factor"),
            high_freq_factor=section.number("high_freq_factor"),
            original_max_position=section.integer("original_max_position_embeddings", max_position),
        )
    raise section.error(name, kind, "default, linear, llama3")


def _activation(fields: Fields, family: _Family) -> Activation:
    if family.is_bloom:
        return "gelu_tanh"
    name, wanted = ("hidden_activation", "gelu_pytorch_tanh") if family.is_gemma else ("hidden_act", "silu")
    value = fields.get(name) or wanted
    if value != wanted:
        raise fields.error(name, value, wanted)
    return "gelu_tanh" if family.is_gemma else "silu"


def _eos_token_ids(fields: Fields, folder: Path) -> tuple[int, ...]:
    ids = list(fields.token_ids("eos_token_id"))
    path = folder / "generation_config.json"
    if path.is_file():
        ids += Fields(read_json(path), str(path)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _dtype(fields: Fields) -> DTypeName:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name) or "float32"
    if value not in _DTYPES:
        raise fields.error(name, value, ", ".join(_DTYPES))
    return _DTYPES[str(value)]
