"""Phi-3 and Phi-4: a Llama that may rotate a part of each head, whose checkpoints have queries, keys and values in one
tensor, and gate and up in another."""

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
    "Phi3ForCausalLM": Family(read=_read, defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5})
}
