"""OLMo 2: post-norm layers, and norms over all heads of queries and keys together. OLMo 3: some layers slide, and only
the full ones are stretched to longer texts."""

from __future__ import annotations

from dataclasses import replace

from raylm.layers.rope_settings import RopeSettings
from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import GGUF_SANDWICH_WEIGHTS, TensorNames
from raylm.models.read_folder import dense
from raylm.models.read_layers import LayerKind, named_kinds, repeated_kinds, rope_of

_PATTERN = 4
"""Of so many layers the last one is full."""


def _read(fields: Fields) -> ArchConfig:
    return _olmo(fields, dense(fields))


def _read_olmo3(fields: Fields) -> ArchConfig:
    kinds = named_kinds(fields) or repeated_kinds(fields.integer("num_hidden_layers"), _PATTERN)
    ropes: dict[LayerKind, RopeSettings] = {
        "full": rope_of(fields, "full"),
        "sliding": rope_of(fields, "sliding", is_scaled=False),
    }
    return _olmo(fields, dense(fields, kinds=kinds, ropes={kind: ropes[kind] for kind in kinds}))


def _olmo(fields: Fields, arch: ArchConfig) -> ArchConfig:
    biased = fields.flag("attention_bias", False)
    return replace(arch, norm_place="post", qk_norm="all_heads", qkv_bias=biased, o_bias=biased)


def _read_gguf(header: read_gguf.Header) -> ArchConfig:
    """An OLMo 3 too, which has a window."""
    full = read_gguf.rope_of(header, read_gguf.head_dim_of(header))
    name = header.prefix + "rope.scaling.attn_factor"
    if full.kind == "yarn" and header.fields.get(name) is not None:
        # Here the first converters wrote all of it.
        full = replace(full, attention_factor=header.fields.number(name))
    ropes: dict[LayerKind, RopeSettings] = {"full": full, "sliding": RopeSettings(full.theta)}
    arch = read_gguf.dense(header, kinds=read_gguf.kinds_of(header, _PATTERN), ropes=ropes)
    return replace(arch, norm_place="post", qk_norm="all_heads")


_DEFAULTS: dict[str, object] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
ARCHITECTURES = {
    "Olmo2ForCausalLM": Family(
        read=_read,
        defaults=_DEFAULTS,
        gguf={"olmo2": _read_gguf},
        names=TensorNames(gguf=GGUF_SANDWICH_WEIGHTS),
    ),
    "Olmo3ForCausalLM": Family(read=_read_olmo3, defaults={**_DEFAULTS, "sliding_window": 4096, "rope_theta": 5e5}),
}
