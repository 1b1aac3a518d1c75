"""Phi-3 and Phi-4: a Llama that may rotate a part of each head, whose checkpoints have queries, keys and values in one
tensor, and gate and up in another."""

from __future__ import annotations

from raylm.models import read_gguf
from raylm.models.families.mistral import read_mistral
from raylm.models.family import Family
from raylm.models.names import GGUF_WEIGHTS, TensorNames

ARCHITECTURES = {
    "Phi3ForCausalLM": Family(
        read=read_mistral,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        gguf={"phi3": read_gguf.dense},
        names=TensorNames(gguf={**GGUF_WEIGHTS, "ffn_up": ("mlp.gate_up_proj", None)}),
    )
}
