"""StableLM 2: LayerNorms, of each head's queries and keys too in the 12B, and a quarter of each head is rotated."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import HF_WEIGHTS, TensorNames
from raylm.models.read_folder import dense


def _read(fields: Fields) -> ArchConfig:
    is_parallel = fields.flag("use_parallel_residual", False)
    return replace(
        dense(fields),
        norm="layer",
        norm_place="parallel" if is_parallel else "pre",
        shared_norm=is_parallel,
        qkv_bias=fields.flag("use_qkv_bias", False),
        qk_norm="heads_apart" if fields.flag("qk_layernorm", False) else None,
    )


ARCHITECTURES = {
    "StableLmForCausalLM": Family(
        read=_read,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        field_names={"layer_norm_eps": "rms_norm_eps"},
        names=TensorNames(
            folder={**HF_WEIGHTS, "q_layernorm.norms": ("q_norm", None), "k_layernorm.norms": ("k_norm", None)}
        ),
    )
}
