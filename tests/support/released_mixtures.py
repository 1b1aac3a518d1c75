"""Released mixtures of experts, and the Granite that is stored as one."""

from __future__ import annotations

import torch

from tests.support.released import (
    EXPERT,
    HEADS,
    INNER,
    KV,
    LAYERS,
    MIXTRAL_EXPERT,
    SIZES,
    D,
    E,
    H,
    Released,
    Shapes,
    V,
    llama,
    matrices,
)
from tests.support.released_newer import GLM_FIELDS, GRANITE_FIELDS, QWEN_FIELDS

_LAYER = "model.layers.*."
_MLP = f"{_LAYER}mlp."
_QKV = ("q_proj", "k_proj", "v_proj")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _head_norms(size: int = D, kv_size: int = D) -> Shapes:
    return {f"{_LAYER}self_attn.q_norm.weight": (size,), f"{_LAYER}self_attn.k_norm.weight": (kv_size,)}


_GRANITE_MOE: Shapes = {
    **llama(mlp=False, head=False),
    f"{_LAYER}block_sparse_moe.input_linear.weight": (E, 2 * INNER, H),
    f"{_LAYER}block_sparse_moe.output_linear.weight": (E, H, INNER),
    f"{_LAYER}block_sparse_moe.router.layer.weight": (E, H),
}
_GRANITE_SHARED = {"shared_mlp.input_linear": (2 * 48, H), "shared_mlp.output_linear": (H, 48)}
_ROUTED: Shapes = {f"{_MLP}gate.weight": (E, H), **matrices(f"{_MLP}experts.#.", EXPERT)}


def _shared(name: str, size: int) -> Shapes:
    return matrices(f"{_MLP}{name}.", {"gate_proj": (size, H), "up_proj": (size, H), "down_proj": (H, size)})


def _glm45() -> Shapes:
    """One dense layer, one with experts, and one that predicts a token more."""
    whole = llama(bias=_QKV, mlp=False)
    found = {name: shape for name, shape in whole.items() if "*" not in name}
    mixture = {**_ROUTED, f"{_MLP}gate.e_score_correction_bias": (E,), **_shared("shared_experts", INNER)}
    dense = matrices(_MLP, EXPERT)
    more = {
        f"{_LAYER}{name}.weight": shape
        for name, shape in {
            "eh_proj": (H, 2 * H),
            "enorm": (H,),
            "hnorm": (H,),
            "embed_tokens": (V, H),
            "shared_head.norm": (H,),
            "shared_head.head": (V, H),
        }.items()
    }
    attention = {name: shape for name, shape in whole.items() if "*" in name} | _head_norms()
    for number, own in enumerate((dense, mixture, mixture | more)):
        found |= {name.replace("*", str(number)): shape for name, shape in (attention | own).items()}
    return found


_EXPERTS = f"{_MLP}experts."

RELEASED = {
    "ibm-granite/granite-3.1-1b-a400m-instruct": Released(
        {
            **GRANITE_FIELDS,
            "architectures": ["GraniteMoeForCausalLM"],
            "model_type": "granitemoe",
            "num_experts_per_tok": 2,
            "num_local_experts": E,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        },
        _GRANITE_MOE,
    ),
    "ibm-research/moe-7b-1b-active-shared-experts": Released(
        {
            **GRANITE_FIELDS,
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "model_type": "granitemoeshared",
            "num_experts_per_tok": 2,
            "num_local_experts": E,
            "shared_intermediate_size": 48,
        },
        {**_GRANITE_MOE, **matrices(_LAYER, _GRANITE_SHARED)},
    ),
    "ibm-granite/granite-4.0-micro": Released(
        {
            **GRANITE_FIELDS,
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "init_method": "mup",
            "layer_types": ["attention"] * LAYERS,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 4,
            "mamba_proj_bias": False,
            "model_type": "granitemoehybrid",
            "normalization_function": "rmsnorm",
            "num_experts_per_tok": 0,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 48,
        },
        {**llama(mlp=False, head=False), **matrices(_LAYER, _GRANITE_SHARED)},
    ),
    "allenai/OLMoE-1B-7B-0924": Released(
        {
            **SIZES,
            "architectures": ["OlmoeForCausalLM"],
            "attention_bias": False,
            "clip_qkv": None,
            "eos_token_id": 90,
            "hidden_act": "silu",
            "model_type": "olmoe",
            "norm_topk_prob": False,
            "num_experts": E,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            "pad_token_id": 1,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
        },
        {**llama(mlp=False), **_ROUTED, **_head_norms(HEADS * D, KV * D)},
    ),
    "zai-org/GLM-4.5-Air": Released(
        {
            **GLM_FIELDS,
            "architectures": ["Glm4MoeForCausalLM"],
            "first_k_dense_replace": 1,
            "model_type": "glm4_moe",
            "moe_intermediate_size": INNER,
            "n_group": 1,
            "n_routed_experts": E,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_nextn_predict_layers": 1,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": True,
        },
        _glm45(),
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": Released(
        {
            **QWEN_FIELDS,
            "architectures": ["Qwen2MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "model_type": "qwen2_moe",
            "moe_intermediate_size": INNER,
            "norm_topk_prob": False,
            "num_experts": E,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 48,
        },
        {
            **llama(bias=_QKV, mlp=False),
            **_ROUTED,
            **_shared("shared_expert", 48),
            f"{_MLP}shared_expert_gate.weight": (1, H),
        },
    ),
    "Qwen/Qwen3-30B-A3B": Released(
        {
            **QWEN_FIELDS,
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": D,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": INNER,
            "norm_topk_prob": True,
            "num_experts": E,
            "num_experts_per_tok": 2,
            "rope_scaling": None,
            "sliding_window": None,
        },
        {**llama(mlp=False), **_ROUTED, **_head_norms()},
    ),
    "mistralai/Mixtral-8x7B-v0.1": Released(
        {
            **SIZES,
            "architectures": ["MixtralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "model_type": "mixtral",
            "num_experts_per_tok": 2,
            "num_local_experts": E,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {
            **llama(mlp=False),
            f"{_LAYER}block_sparse_moe.gate.weight": (E, H),
            **matrices(f"{_LAYER}block_sparse_moe.experts.#.", MIXTRAL_EXPERT),
        },
    ),
    "deepseek-ai/deepseek-moe-16b-base": Released(
        {
            **SIZES,
            "architectures": ["DeepseekForCausalLM"],
            "attention_bias": False,
            "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
            "aux_loss_alpha": 0.001,
            "bos_token_id": 90,
            "eos_token_id": 91,
            "first_k_dense_replace": 0,
            "hidden_act": "silu",
            "model_type": "deepseek",
            "moe_intermediate_size": INNER,
            "moe_layer_freq": 1,
            "n_routed_experts": E,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 2,
            "num_key_value_heads": HEADS,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000,
            "scoring_func": "softmax",
            "seq_aux": True,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {**llama(kv=HEADS, mlp=False), **_ROUTED, **_shared("shared_experts", 2 * INNER)},
        in_transformers=False,
    ),
    "openai/gpt-oss-20b": Released(
        {
            **SIZES,
            "architectures": ["GptOssForCausalLM"],
            "intermediate_size": H,
            "attention_bias": True,
            "eos_token_id": 90,
            "experts_per_token": 2,
            "head_dim": D,
            "hidden_act": "silu",
            "initial_context_length": 8,
            "layer_types": [_SLIDING, _FULL],
            "model_type": "gpt_oss",
            "num_experts_per_tok": 2,
            "num_local_experts": E,
            "output_router_logits": False,
            "pad_token_id": 91,
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
                "quant_method": "mxfp4",
            },
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 8,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 4,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
        },
        {
            **llama(mlp=False, bias=(*_QKV, "o_proj")),
            f"{_LAYER}self_attn.sinks": (HEADS,),
            f"{_MLP}router.weight": (E, H),
            f"{_MLP}router.bias": (E,),
            f"{_EXPERTS}gate_up_proj_blocks": (E, 2 * H, H // 32, 16),
            f"{_EXPERTS}gate_up_proj_scales": (E, 2 * H, H // 32),
            f"{_EXPERTS}gate_up_proj_bias": (E, 2 * H),
            f"{_EXPERTS}down_proj_blocks": (E, H, H // 32, 16),
            f"{_EXPERTS}down_proj_scales": (E, H, H // 32),
            f"{_EXPERTS}down_proj_bias": (E, H),
        },
        {"_blocks": torch.uint8, "_scales": torch.uint8},
        in_transformers=False,  # it needs a GPU to decode them
    ),
}
