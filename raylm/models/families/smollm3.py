"""SmolLM3: a Llama of which every fourth layer has no positional embedding (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from raylm.models import read_gguf
from raylm.models.arch import ArchConfig
from raylm.models.families.llama import read_llama
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import TensorNames

_INTERVAL = 4


def _read(fields: Fields) -> ArchConfig:
    if fields.flag("use_sliding_window", False):
        raise fields.error("use_sliding_window", True, "false")
    return read_llama(fields, _nope_layers(fields))


def _nope_layers(fields: Fields) -> tuple[int, ...]:
    """no_rope_layers has a 0 for each of them."""
    name, count = "no_rope_layers", fields.integer("num_hidden_layers")
    if fields.get(name) is None:
        interval = fields.integer("no_rope_layer_interval", _INTERVAL)
        return tuple(range(interval - 1, count, interval))
    flags = fields.token_ids(name)
    if len(flags) != count or not set(flags) <= {0, 1}:
        raise fields.error(name, fields.get(name), f"{count} numbers, each one 0 or 1")
    return tuple(layer for layer, is_rotated in enumerate(flags) if not is_rotated)


def _read_gguf(header: read_gguf.Header) -> ArchConfig:
    arch = read_gguf.dense(header)
    layers = [replace(layer, rope=None) if (i + 1) % _INTERVAL == 0 else layer for i, layer in enumerate(arch.layers)]
    return replace(arch, layers=tuple(layers))


ARCHITECTURES = {
    "SmolLM3ForCausalLM": Family(
        read=_read,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        gguf={"smollm3": _read_gguf},
        names=TensorNames(gguf_pairs=True),
    )
}
