"""Mistral's own description of a model, params.json, as the fields that config.json has. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raylm.models.fields import Fields
from raylm.models.read_json import read_json

_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "model_max_length": "max_position_embeddings",
}
"""Keys of params.json -> fields of config.json."""
_MOE = "moe"
_EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
"""Keys of its section for experts."""
_YARN, _QUERIES = "yarn", "llama_4_scaling"
_ORIGINAL = "original_max_position_embeddings"
_WITHOUT_EFFECT = ("causal", "model_type", "dtype", "use_cache", "use_biases")
_USUAL_LENGTH = 32768
"""Older files name no length; Mistral's models of that time were trained for this one."""
_BOS, _EOS = 1, 2
"""In every tokenizer of Mistral."""


def params_as_config(path: Path) -> dict[str, object]:
    """The fields of a MistralForCausalLM, or with experts of a MixtralForCausalLM. Raises ConfigError for a key that
    says the model is another."""
    values = read_json(path)
    fields = Fields(values, str(path))
    _check_names(fields, values, (*_NAMES, _MOE, _YARN, _QUERIES, *_WITHOUT_EFFECT))
    if fields.get("use_biases"):
        raise fields.error("use_biases", True, "false")
    # Layers see all tokens where the window is null or not there.
    found: dict[str, object] = {"sliding_window": None, "max_position_embeddings": _USUAL_LENGTH}
    found |= {_NAMES[name]: value for name, value in values.items() if name in _NAMES and value is not None}
    architecture = "MistralForCausalLM"
    if values.get(_MOE):
        architecture, experts = "MixtralForCausalLM", fields.section(_MOE)
        _check_names(experts, values[_MOE], tuple(_EXPERTS))
        found |= {own: experts.integer(name) for name, own in _EXPERTS.items()}
    found |= _rope(fields)
    own = {"architectures": [architecture], "bos_token_id": _BOS, "eos_token_id": _EOS, "dtype": "bfloat16"}
    return {**found, **own}


def _rope(fields: Fields) -> dict[str, object]:
    """Rotary embeddings that are stretched (YaRN), and queries that grow with their positions."""
    if not fields.get(_YARN):
        if fields.get(_QUERIES):
            raise fields.error(_QUERIES, fields.get(_QUERIES), f"a key beside {_YARN}")
        return {}
    yarn, theta = fields.section(_YARN), fields.number("rope_theta", 1e4)
    _check_names(yarn, yarn.values, (_ORIGINAL, "factor", "beta", "alpha", "apply_scale"))
    rope: dict[str, object] = {
        "rope_type": _YARN,
        "rope_theta": theta,
        "factor": yarn.number("factor"),
        _ORIGINAL: yarn.integer(_ORIGINAL),
        "beta_fast": yarn.number("beta", 32.0),
        "beta_slow": yarn.number("alpha", 1.0),
    }
    if not yarn.flag("apply_scale", True):
        rope["attention_factor"] = 1.0
    if fields.get(_QUERIES):
        queries = fields.section(_QUERIES)
        _check_names(queries, queries.values, (_ORIGINAL, "beta"))
        if queries.integer(_ORIGINAL, yarn.integer(_ORIGINAL)) != yarn.integer(_ORIGINAL):
            raise queries.error(_ORIGINAL, queries.get(_ORIGINAL), f"that of {_YARN}, {yarn.get(_ORIGINAL)}")
        rope["llama_4_scaling_beta"] = queries.number("beta")
    return {"rope_parameters": rope}


def _check_names(fields: Fields, values: Mapping[str, object], known: tuple[str, ...]) -> None:
    for name, value in values.items():
        if name not in known and value not in (None, False):
            raise fields.error(name, value, f"no such key; known: {', '.join(known)}")
