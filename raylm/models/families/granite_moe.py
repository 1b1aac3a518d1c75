"""Granite-MoE: a Granite with experts, each projection of all of them in one tensor, and perhaps an MLP beside them for
all tokens. Granite 4.0 without Mamba: a Granite by the names of the hybrid ones, whose MLP that one is."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.families.granite import read_granite, read_granite_gguf
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import HF_WEIGHTS, TensorNames
from raylm.models.read_folder import experts_of, mlp_of, with_experts

_ATTENTION = ("attention", "full_attention")


def _read(fields: Fields) -> ArchConfig:
    experts = experts_of(fields, size="intermediate_size", normalized=True)
    if fields.get("shared_intermediate_size"):
        experts = replace(experts, shared=mlp_of(_with_shared_size(fields)))
    return with_experts(read_granite(fields), experts)


def _read_hybrid(fields: Fields) -> ArchConfig:
    kinds, experts = fields.get("layer_types"), fields.get("num_local_experts")
    if not isinstance(kinds, list) or not all(kind in _ATTENTION for kind in kinds):
        raise fields.error("layer_types", kinds, f"{' or '.join(_ATTENTION)} for every layer (there is no Mamba here)")
    if experts:
        raise fields.error("num_local_experts", experts, "0")
    rotates = fields.get("position_embedding_type") == "rope"
    return read_granite(_with_shared_size(fields), () if rotates else range(len(kinds)))


def _with_shared_size(fields: Fields) -> Fields:
    return fields.having(intermediate_size=fields.get("shared_intermediate_size"))


_MOE = Family(
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
            "shared_mlp.input_linear": ("mlp.shared_expert.gate_up_proj", None),
            "shared_mlp.output_linear": ("mlp.shared_expert.down_proj", None),
        },
    ),
)
ARCHITECTURES = {
    "GraniteMoeForCausalLM": _MOE,
    "GraniteMoeSharedForCausalLM": replace(_MOE, gguf={}),
    "GraniteMoeHybridForCausalLM": Family(
        read=_read_hybrid,
        defaults={"max_position_embeddings": 2048, "shared_intermediate_size": 1024},
        names=TensorNames(
            folder={
                **HF_WEIGHTS,
                "shared_mlp": ("mlp", None),
                "input_linear": ("gate_up_proj", None),
                "output_linear": ("down_proj", None),
            }
        ),
    ),
}
