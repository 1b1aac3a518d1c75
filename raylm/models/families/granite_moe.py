"""Granite-MoE: a Granite with experts, each projection of all of them in one tensor."""

from __future__ import annotations

from raylm.models.arch import ArchConfig
from raylm.models.families.granite import read_granite, read_granite_gguf
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import HF_WEIGHTS, TensorNames
from raylm.models.read_folder import experts_of, with_experts


def _read(fields: Fields) -> ArchConfig:
    return with_experts(read_granite(fields), experts_of(fields, size="intermediate_size", normalized=True))


ARCHITECTURES = {
    "GraniteMoeForCausalLM": Family(
        read=_read,
        defaults={"max_position_embeddings": 2048, "num_experts": 8, "num_experts_per_tok": 2},
        field_names={"num_local_experts": "num_experts"},
        gguf={"granitemoe": read_granite_gguf},
        names=TensorNames(
            gguf_pairs=True,
            folder={
                **HF_WEIGHTS,
                "block_sparse_moe": ("mlp", None),
                "router.layer": ("gate", None),
                "input_linear": ("experts.gate_up_proj", None),
                "output_linear": ("experts.down_proj", None),
            },
        ),
    )
}
