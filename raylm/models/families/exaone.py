"""EXAONE 3 and 3.5: a Llama by names of its own."""

from __future__ import annotations

from raylm.models.arch import ArchConfig
from raylm.models.family import Family
from raylm.models.fields import Fields
from raylm.models.names import HF_WEIGHTS, TensorNames
from raylm.models.read_folder import dense, mlp_of


def _read(fields: Fields) -> ArchConfig:
    return dense(fields, mlp=mlp_of(fields, name="activation_function"))


ARCHITECTURES = {
    "ExaoneForCausalLM": Family(
        read=_read,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2},
        field_names={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"},
        names=TensorNames(
            folder={
                **HF_WEIGHTS,
                "wte": ("embed_tokens", None),
                "h": ("layers", None),
                "attn.attention": ("self_attn", None),
                "out_proj": ("o_proj", None),
                "ln_1": ("input_layernorm", None),
                "ln_2": ("post_attention_layernorm", None),
                "c_fc_0": ("gate_up_proj", "gate"),
                "c_fc_1": ("gate_up_proj", "up"),
                "c_proj": ("down_proj", None),
                "ln_f": ("norm", None),
            },
            prefixes=("transformer.",),
        ),
    )
}
