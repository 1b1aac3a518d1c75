"""StarCoder2: LayerNorms, biases, an MLP without gate, and a sliding window."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import HF_WEIGHTS, TensorNames
from raylm.models.read_folder import dense, mlp_of
from raylm.models.read_layers import uniform_kinds


def _read(fields: Fields) -> ArchConfig:
    biased = fields.flag("use_bias", True)
    mlp = mlp_of(fields, activation="gelu_pytorch_tanh", gated=False, bias=biased)
    return replace(
        dense(fields, kinds=uniform_kinds(fields), mlp=mlp),
        norm="layer",
        qkv_bias=biased,
        o_bias=biased,
    )


ARCHITECTURES = {
    "Starcoder2ForCausalLM": Family(
        read=_read,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        field_names={"norm_epsilon": "rms_norm_eps"},
        names=TensorNames(folder={**HF_WEIGHTS, "c_fc": ("up_proj", None), "c_proj": ("down_proj", None)}),
    )
}
