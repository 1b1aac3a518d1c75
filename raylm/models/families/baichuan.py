"""Baichuan: a Llama whose queries, keys and values are one tensor. The 13B has linear biases for positions, the second
generation a normed head."""

from __future__ import annotations

from dataclasses import replace

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import HF_WEIGHTS, TensorNames
from raylm.models.read_folder import dense

_LAYERS_OF_13B = 40
_VOCABULARY_OF_2 = 125696


def _read(fields: Fields) -> ArchConfig:
    """config.json does not say which of them it is; the authors' own code of each knows."""
    has_alibi = fields.integer("num_hidden_layers") == _LAYERS_OF_13B
    arch = dense(fields, ropes={} if has_alibi else None)
    return replace(arch, alibi=1.0 if has_alibi else 0.0, norm_head=arch.vocab_size == _VOCABULARY_OF_2)


_FAMILY = Family(
    read=_read,
    defaults={"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2},
    field_names={"model_max_length": "max_position_embeddings"},
    names=TensorNames(folder={**HF_WEIGHTS, "W_pack": ("qkv_proj", None)}),
)
# The first release of the 7B has a small c.
ARCHITECTURES = {"BaichuanForCausalLM": _FAMILY, "BaiChuanForCausalLM": _FAMILY}
