"""Command R: attention and MLP side by side behind one LayerNorm without bias, rotary dimensions in pairs. Command R7B
and A: some layers slide, and the others have no positional embedding."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import TensorNames
from raylm.models.read_folder import dense, mlp_of
from raylm.models.read_layers import named_kinds, repeated_kinds


def _read(fields: Fields) -> ArchConfig:
    arch = _cohere(fields, dense(fields, mlp=mlp_of(fields)))
    return replace(arch, qk_norm="each_head" if fields.flag("use_qk_norm", False) else None)


def _read_cohere2(fields: Fields) -> ArchConfig:
    if fields.flag("use_qk_norm", False):
        raise fields.error("use_qk_norm", True, "false")
    pattern = fields.integer("sliding_window_pattern", 4)
    kinds = named_kinds(fields) or repeated_kinds(fields.integer("num_hidden_layers"), pattern)
    nope_layers = [layer for layer, kind in enumerate(kinds) if kind == "full"]
    return _cohere(fields, dense(fields, kinds=kinds, nope_layers=nope_layers))


def _cohere(fields: Fields, arch: ArchConfig) -> ArchConfig:
    # The published models say there what they were trained for in the end.
    length = max(arch.max_position, fields.integer("model_max_length", arch.max_position))
    biased = fields.flag("attention_bias", False)
    return replace(
        arch,
        max_position=length,
        norm="layer",
        norm_bias=False,
        norm_place="parallel",
        shared_norm=True,
        qkv_bias=biased,
        o_bias=biased,
        logits_divisor=1 / fields.number("logit_scale"),
    )


_DEFAULTS: dict[str, object] = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
_FIELD_NAMES = {"layer_norm_eps": "rms_norm_eps"}
_NAMES = TensorNames(pairs=True)
ARCHITECTURES = {
    "CohereForCausalLM": Family(read=_read, defaults=_DEFAULTS, field_names=_FIELD_NAMES, names=_NAMES),
    "Cohere2ForCausalLM": Family(
        read=_read_cohere2,
        defaults={**_DEFAULTS, "sliding_window": 4096},
        field_names=_FIELD_NAMES,
        names=_NAMES,
    ),
}
