"""Nemotron and Minitron: LayerNorms whose weights are stored less 1, half of each head rotated, squared ReLU."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import TensorNames
from raylm.models.read_folder import dense, mlp_of

_NAMES = TensorNames(folder={"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")})


def _read(fields: Fields) -> ArchConfig:
    biased = fields.flag("attention_bias", False)
    mlp = mlp_of(fields, activation="relu2", gated=False, bias=fields.flag("mlp_bias", False))
    return replace(dense(fields, mlp=mlp), norm="layer", norm_offset=1.0, qkv_bias=biased, o_bias=biased)


ARCHITECTURES = {
    "NemotronForCausalLM": Family(
        read=_read,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        field_names={"norm_eps": "rms_norm_eps", "rope_percent": "partial_rotary_factor"},
        names=_NAMES,
    )
}
