"""EXAONE 4: post-norm layers and normed heads; where some layers slide, the others have no positional embedding."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.read_folder import dense
from raylm.models.read_layers import LayerKind, named_kinds, repeated_kinds, rope_of


def _read(fields: Fields) -> ArchConfig:
    kinds, slides = _kinds(fields), fields.get("sliding_window") is not None
    rope = rope_of(fields, "full")
    nope_layers = [layer for layer, kind in enumerate(kinds) if slides and kind == "full"]
    arch = dense(fields, kinds=kinds, ropes={"full": rope, "sliding": rope}, nope_layers=nope_layers)
    return replace(arch, norm_place="post", qk_norm="head")


def _kinds(fields: Fields) -> list[LayerKind]:
    count = fields.integer("num_hidden_layers")
    if fields.get("sliding_window") is None:
        return ["full"] * count
    if (named := named_kinds(fields)) is not None:
        return named
    pattern = fields.get("sliding_window_pattern")
    length = len(pattern) if isinstance(pattern, str) else fields.integer("sliding_window_pattern", 4)
    kinds = repeated_kinds(count, length)
    kinds[-1] = "full"
    return kinds


ARCHITECTURES = {
    "Exaone4ForCausalLM": Family(
        read=_read,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    )
}
