"""Models that raylm has no family for: transformers' own modules, with raylm's attention, cache and linear layers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from raylm.errors import ConfigError
from raylm.models.arch import ArchConfig, MLPSpec
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import TensorNames
from raylm.models.read_folder import dense
from raylm.models.read_layers import LayerKind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

THROUGH_TRANSFORMERS = "TransformersForCausalLM"
_KINDS: dict[object, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}
_READ = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "intermediate_size", "tie_word_embeddings", "sliding_window", "bos_token_id"),
)
"""What all configurations of transformers call by these names, whatever config.json does."""
_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on how long a sequence is: a step has many, and the modules take one length."""


def transformers_has(values: Mapping[str, object]) -> bool:
    """Whether config.json's `architectures` names a causal language model of the installed transformers, of the
    model_type that it says."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names, known = values.get("architectures"), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(values.get("model_type")))
    known = [known] if isinstance(known, str) else known or []
    return isinstance(names, list) and bool(names) and names[0] in known and "text_config" not in values


def transformers_config(text: str) -> PreTrainedConfig:
    """The configuration that a config.json is. Raises ConfigError where transformers refuses it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = json.loads(text)
    try:
        return CONFIG_MAPPING[values["model_type"]].from_dict(values)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"config.json: transformers refuses it: {' '.join(str(error).split())}") from None


def read_transformers(fields: Fields) -> ArchConfig:
    """The sizes that raylm's cache, attention and split linear layers need. Raises ConfigError for a model that they
    cannot serve."""
    text = json.dumps(dict(fields.values))
    config = transformers_config(text)
    for reason in _reasons(config):
        _refuse(fields, reason)
    known = Fields({name: getattr(config, name, None) for name in _READ}, fields.source)
    size = known.integer("intermediate_size", 4 * known.integer("hidden_size"))
    given = {name: fields.get(name) for name in ("dtype", "torch_dtype")}
    if getattr(config, "multi_query", False):  # GPTBigCode does not say so otherwise
        given["num_key_value_heads"] = 1
    arch = dense(
        known.having(**given),
        kinds=_kinds(fields, config),
        ropes={},
        mlp=MLPSpec(size=size, activation="silu"),  # for estimates alone
    )
    return replace(arch, transformers_config=text)


def _kinds(fields: Fields, config: PreTrainedConfig) -> list[LayerKind]:
    layers = Fields({"num_hidden_layers": config.num_hidden_layers}, fields.source).integer("num_hidden_layers")
    names = getattr(config, "layer_types", None)
    if names is None:
        slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        return ["sliding" if slides else "full"] * layers
    if len(names) != layers or any(name not in _KINDS for name in names):
        _refuse(fields, f"its layer_types are {', '.join(map(str, dict.fromkeys(names)))}, not {' or '.join(_KINDS)}")
    return [_KINDS[name] for name in names]


def _reasons(config: PreTrainedConfig) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it has an encoder"
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        yield "its layers have no attention, or each another"
    if getattr(config, "kv_lora_rank", None):
        yield "its attention keeps latent vectors (MLA), no keys and values"
    if getattr(config, "num_kv_shared_layers", None):
        yield "its layers share keys and values"
    if getattr(config, "word_embed_proj_dim", None) not in (None, getattr(config, "hidden_size", None)):
        yield "its embedding and head have another width than its layers"
    if getattr(config, "alibi", False):
        yield "its attention has linear biases"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in _BY_LENGTH:
            yield f"its rope_type is {rope['rope_type']}, which follows the length of one sequence"


def _refuse(fields: Fields, reason: str) -> NoReturn:
    raise ConfigError(
        f"{fields.source}: architectures is {fields.get('architectures')!r}, which raylm has no family for, and "
        f"transformers' own cannot run on raylm's cache: {reason}"
    )


ARCHITECTURES = {
    THROUGH_TRANSFORMERS: Family(
        read=read_transformers,
        # Tensors have the names of transformers' modules, some without the name of the whole.
        names=TensorNames(folder={}, prefixes=("model.", "transformer.", "gpt_neox.", "backbone.", "biogpt.")),
        model="raylm.models.transformers_model:TransformersModel",
    )
}
