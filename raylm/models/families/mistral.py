"""Mistral: a Llama whose layers may all have a sliding window."""

from __future__ import annotations

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.read_folder import dense


def _read(fields: Fields) -> ArchConfig:
    if fields.get("sliding_window") is None:
        return dense(fields)
    return dense(fields, kinds=["sliding"] * fields.integer("num_hidden_layers"))


ARCHITECTURES = {
    "MistralForCausalLM": Family(read=_read, defaults={"max_position_embeddings": 131072, "sliding_window": 4096})
}
