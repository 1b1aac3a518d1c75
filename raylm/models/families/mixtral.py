"""Mixtral: a Mistral with experts in every layer."""

from __future__ import annotations

from raylm.models.arch import ArchConfig
from raylm.models.families.mistral import read_mistral
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import MIXTRAL_WEIGHTS, TensorNames
from raylm.models.read_folder import experts_of, with_experts


def _read(fields: Fields) -> ArchConfig:
    return with_experts(read_mistral(fields), experts_of(fields, size="intermediate_size", normalized=True))


ARCHITECTURES = {
    "MixtralForCausalLM": Family(
        read=_read,
        defaults={
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        field_names={"num_local_experts": "num_experts"},
        names=TensorNames(folder=MIXTRAL_WEIGHTS),
    )
}
