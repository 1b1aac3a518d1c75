"""Released checkpoints as their vendors publish them: every field of config.json that says how the model is made, and
the name and shape of every tensor, with the sizes shrunk. Layers are all alike but where a name says which."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

V, H, INNER, E, P = 96, 64, 80, 4, 32
"""The vocabulary, the model's width, the columns of an MLP, the experts and the positions of all of them."""
LAYERS, HEADS, KV, D = 2, 4, 2, 16
Shapes = dict[str, tuple[int, ...]]


class Released(NamedTuple):
    """`shapes`: of the tensors, "*" standing for the number of a layer. `types`: by the end of the name, of those that
    are no weights."""

    config: Mapping[str, object]
    shapes: Shapes
    types: Mapping[str, torch.dtype] = {}
    file: str = "model.safetensors"
    tied: tuple[str, ...] = ()
    """The embedding, and the head that is stored beside it all the same."""
    in_transformers: bool = True
    """transformers computes the same from the folder; it has not the code of the others, or not what they become for
    long texts."""

    def write(self, folder: Path) -> Path:
        """The folder, with random weights that a mistake would show in."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        generator = torch.Generator().manual_seed(0)
        tensors = {name: self._tensor(name, shape, generator) for name, shape in self._each()}
        if self.tied:
            tensors[self.tied[1]] = tensors[self.tied[0]].clone()
        save: Callable[[dict[str, Tensor], Path], object] = save_file if "safetensors" in self.file else torch.save
        save(tensors, folder / self.file)
        return folder

    def _each(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, shape in self.shapes.items():
            counts = (range(LAYERS) if "*" in name else [None], range(E) if "#" in name else [None])
            for layer in counts[0]:
                for expert in counts[1]:
                    yield name.replace("*", str(layer)).replace("#", str(expert)), shape

    def _tensor(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        dtype = next((dtype for end, dtype in self.types.items() if name.endswith(end)), None)
        if dtype is not None:
            return torch.ones(shape, dtype=dtype)
        return torch.randn(shape, generator=generator) * 0.15


def _matrices(prefix: str, rows: Mapping[str, tuple[int, int]], *, bias: bool = False) -> Shapes:
    """Of linear layers, [out, in]."""
    found: Shapes = {f"{prefix}{name}.weight": shape for name, shape in rows.items()}
    return found | ({f"{prefix}{name}.bias": shape[:1] for name, shape in rows.items()} if bias else {})


def _norms(*names: str, bias: bool = False, size: int = H) -> Shapes:
    found: Shapes = {f"{name}.weight": (size,) for name in names}
    return found | ({f"{name}.bias": (size,) for name in names} if bias else {})


def _llama(
    *,
    heads: int = HEADS,
    kv: int = KV,
    inner: int = INNER,
    head: bool = True,
    bias: tuple[str, ...] = (),
    mlp: bool = True,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    prefix: str = "model.",
) -> Shapes:
    """By transformers' names. `bias`: of the projections of attention that have one."""
    layer = f"{prefix}layers.*."
    rows = {"q_proj": (heads * D, H), "k_proj": (kv * D, H), "v_proj": (kv * D, H), "o_proj": (H, heads * D)}
    found: Shapes = {f"{prefix}embed_tokens.weight": (V, H), f"{prefix}norm.weight": (H,)}
    for name, shape in rows.items():
        found |= _matrices(f"{layer}self_attn.", {name: shape}, bias=name in bias)
    if mlp:
        found |= _matrices(f"{layer}mlp.", {"gate_proj": (inner, H), "up_proj": (inner, H), "down_proj": (H, inner)})
    found |= _norms(*(layer + norm for norm in norms))
    return found | ({"lm_head.weight": (V, H)} if head else {})


_SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": P,
}
_MEGATRON_MLP = {"mlp.dense_h_to_4h": (4 * H, H), "mlp.dense_4h_to_h": (H, 4 * H)}
_NEOX = "gpt_neox.layers.*."
_PYTHIA = Released(
    {
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": H,
        "initializer_range": 0.02,
        "intermediate_size": 4 * H,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": P,
        "model_type": "gpt_neox",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": V,
    },
    {
        "embed_out.weight": (V, H),
        "gpt_neox.embed_in.weight": (V, H),
        **_norms("gpt_neox.final_layer_norm", f"{_NEOX}input_layernorm", bias=True),
        **_norms(f"{_NEOX}post_attention_layernorm", bias=True),
        **_matrices(_NEOX, {"attention.query_key_value": (3 * H, H), "attention.dense": (H, H)}, bias=True),
        **_matrices(_NEOX, _MEGATRON_MLP, bias=True),
        f"{_NEOX}attention.bias": (1, 1, P, P),
        f"{_NEOX}attention.masked_bias": (),
        f"{_NEOX}attention.rotary_emb.inv_freq": (2,),
    },
    {".attention.bias": torch.bool},
)
_GPT2_FIELDS = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": P,
    "n_embd": H,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "n_positions": P,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": V,
}


def _gpt2(prefix: str) -> Shapes:
    layer = f"{prefix}h.*."
    columns = {"attn.c_attn": (H, 3 * H), "attn.c_proj": (H, H), "mlp.c_fc": (H, 4 * H), "mlp.c_proj": (4 * H, H)}
    return {
        f"{prefix}wte.weight": (V, H),
        f"{prefix}wpe.weight": (P, H),
        **_norms(f"{prefix}ln_f", f"{layer}ln_1", f"{layer}ln_2", bias=True),
        **{f"{layer}{name}.weight": shape for name, shape in columns.items()},
        **{f"{layer}{name}.bias": shape[1:] for name, shape in columns.items()},
        f"{layer}attn.bias": (1, 1, P, P),
    }


_OPT = "decoder.layers.*."
_BLOOM = "h.*."
_FALCON = "transformer.h.*."
_FALCON_FIELDS = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_size": H,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "vocab_size": V,
}


_FALCON_TIED = ("transformer.word_embeddings.weight", "lm_head.weight")


def _falcon(kv: int, *norms: str, head: bool = True) -> Shapes:
    return {
        "transformer.word_embeddings.weight": (V, H),
        **_norms("transformer.ln_f", *(_FALCON + norm for norm in norms), bias=True),
        **_matrices(
            _FALCON,
            {"self_attention.query_key_value": ((HEADS + 2 * kv) * D, H), "self_attention.dense": (H, H)},
        ),
        **_matrices(_FALCON, _MEGATRON_MLP),
        **({"lm_head.weight": (V, H)} if head else {}),
    }


_INTERNLM2 = "model.layers.*."
_CHANGED_BY_LENGTH = {"factor": 2.0, "type": "dynamic"}
_LONGROPE = {
    "long_factor": [1.0 + i / 4 for i in range(8)],
    "short_factor": [1.0] * 8,
}
_PHI3 = "model.layers.*."
_PHI3_SHAPES: Shapes = {
    "model.embed_tokens.weight": (V, H),
    **_norms("model.norm", f"{_PHI3}input_layernorm", f"{_PHI3}post_attention_layernorm"),
    **_matrices(_PHI3, {"self_attn.qkv_proj": ((HEADS + 2 * KV) * D, H), "self_attn.o_proj": (H, H)}),
    **_matrices(_PHI3, {"mlp.gate_up_proj": (2 * INNER, H), "mlp.down_proj": (H, INNER)}),
}
_EXPERT = {"gate_proj": (INNER, H), "up_proj": (INNER, H), "down_proj": (H, INNER)}
_MIXTRAL_EXPERT = {"w1": (INNER, H), "w2": (H, INNER), "w3": (INNER, H)}
_MOE = "model.layers.*.mlp."
_QWEN_MOE: Shapes = {f"{_MOE}gate.weight": (E, H), **_matrices(f"{_MOE}experts.#.", _EXPERT)}
_BIASED_LAYER_NORMS = ("model.norm", "model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm")
RELEASED = {
    "EleutherAI/pythia-70m": _PYTHIA,
    "togethercomputer/RedPajama-INCITE-Base-3B-v1": _PYTHIA._replace(
        config={**_PYTHIA.config, "rotary_pct": 1.0, "use_parallel_residual": False},
        shapes={**_PYTHIA.shapes, f"{_NEOX}attention.rotary_emb.inv_freq": (8,)},
        file="pytorch_model.bin",
    ),
    "openai-community/gpt2": Released(_GPT2_FIELDS, _gpt2("")),
    "microsoft/DialoGPT-medium": Released(
        {**_GPT2_FIELDS, "conversational": True},
        {**_gpt2("transformer."), "transformer.h.*.attn.masked_bias": ()},
        {".attn.bias": torch.uint8},
        "pytorch_model.bin",
        ("transformer.wte.weight", "lm_head.weight"),
    ),
    "facebook/opt-125m": Released(
        {
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "architectures": ["OPTForCausalLM"],
            "bos_token_id": 2,
            "do_layer_norm_before": True,
            "eos_token_id": 2,
            "ffn_dim": INNER,
            "hidden_size": H,
            "layerdrop": 0.0,
            "max_position_embeddings": P,
            "model_type": "opt",
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "pad_token_id": 1,
            "prefix": "</s>",
            "torch_dtype": "float16",
            "vocab_size": V,
            "word_embed_proj_dim": H,
        },
        {
            "decoder.embed_tokens.weight": (V, H),
            "decoder.embed_positions.weight": (P + 2, H),
            **_norms("decoder.final_layer_norm", f"{_OPT}self_attn_layer_norm", f"{_OPT}final_layer_norm", bias=True),
            **_matrices(
                f"{_OPT}self_attn.", dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), (H, H)), bias=True
            ),
            **_matrices(_OPT, {"fc1": (INNER, H), "fc2": (H, INNER)}, bias=True),
        },
        file="pytorch_model.bin",
        tied=("decoder.embed_tokens.weight", "lm_head.weight"),
    ),
    "bigscience/bloom-560m": Released(
        {
            "apply_residual_connection_post_layernorm": False,
            "architectures": ["BloomForCausalLM"],
            "attention_softmax_in_fp32": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "layer_norm_epsilon": 1e-05,
            "model_type": "bloom",
            "n_embed": H,
            "n_inner": None,
            "n_layer": LAYERS,
            "num_attention_heads": HEADS,
            "offset_alibi": 100,
            "pretraining_tp": 1,
            "seq_length": P,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "unk_token_id": 0,
            "vocab_size": V,
        },
        {
            "word_embeddings.weight": (V, H),
            **_norms("word_embeddings_layernorm", "ln_f", f"{_BLOOM}input_layernorm", bias=True),
            **_norms(f"{_BLOOM}post_attention_layernorm", bias=True),
            **_matrices(
                _BLOOM, {"self_attention.query_key_value": (3 * H, H), "self_attention.dense": (H, H)}, bias=True
            ),
            **_matrices(_BLOOM, _MEGATRON_MLP, bias=True),
        },
    ),
    "tiiuae/falcon-7b": Released(
        {**_FALCON_FIELDS, "multi_query": True, "new_decoder_architecture": False},
        _falcon(1, "input_layernorm"),
        tied=_FALCON_TIED,
    ),
    "tiiuae/falcon-40b": Released(
        {**_FALCON_FIELDS, "new_decoder_architecture": True, "num_kv_heads": KV},
        _falcon(KV, "ln_attn", "ln_mlp"),
        tied=_FALCON_TIED,
    ),
    "tiiuae/falcon-11B": Released(
        {
            **_FALCON_FIELDS,
            "activation": "gelu",
            "ff_factor": 4,
            "ffn_hidden_size": 4 * H,
            "max_position_embeddings": P,
            "multi_query": True,
            "new_decoder_architecture": True,
            "num_kv_heads": KV,
            "num_ln_in_parallel_attn": 1,
            "rope_scaling": None,
            "rope_theta": 500042.0,
            "tie_word_embeddings": False,
        },
        _falcon(KV, "input_layernorm"),
    ),
    "tiiuae/Falcon3-1B-Base": Released(
        {
            **_SIZES,
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "eos_token_id": 11,
            "head_dim": D,
            "hidden_act": "silu",
            "mlp_bias": False,
            "model_type": "llama",
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000042,
            "tie_word_embeddings": False,
        },
        _llama(),
    ),
    "baichuan-inc/Baichuan2-7B-Chat": Released(
        {
            **{name: value for name, value in _SIZES.items() if name != "num_key_value_heads"},
            "architectures": ["BaichuanForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "model_max_length": P,
            "model_type": "baichuan",
            "pad_token_id": 0,
            "rms_norm_eps": 1e-06,
            "_from_model_config": True,
            "tie_word_embeddings": False,
            "tokenizer_class": "BaichuanTokenizer",
            "torch_dtype": "bfloat16",
            "z_loss_weight": 0,
        },
        {
            **{
                name: shape
                for name, shape in _llama(kv=HEADS).items()
                if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            },
            "model.layers.*.self_attn.W_pack.weight": (3 * H, H),
            "model.layers.*.self_attn.rotary_emb.inv_freq": (D // 2,),
        },
        file="pytorch_model.bin",
        in_transformers=False,
    ),
    "internlm/internlm2_5-7b-chat": Released(
        {
            **_SIZES,
            "architectures": ["InternLM2ForCausalLM"],
            "attn_implementation": "eager",
            "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
            "bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "model_type": "internlm2",
            "pad_token_id": 2,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": _CHANGED_BY_LENGTH,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {
            "model.tok_embeddings.weight": (V, H),
            "output.weight": (V, H),
            **_norms("model.norm", f"{_INTERNLM2}attention_norm", f"{_INTERNLM2}ffn_norm"),
            **_matrices(_INTERNLM2, {"attention.wqkv": ((HEADS + 2 * KV) * D, H), "attention.wo": (H, H)}),
            **_matrices(f"{_INTERNLM2}feed_forward.", _MIXTRAL_EXPERT),
        },
        in_transformers=False,
    ),
    "internlm/internlm3-8b-instruct": Released(
        {
            **_SIZES,
            "architectures": ["InternLM3ForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"},
            "bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": D,
            "hidden_act": "silu",
            "model_type": "internlm3",
            "qkv_bias": False,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
            "rope_theta": 50000000,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        _llama(),
        in_transformers=False,
    ),
    "openbmb/MiniCPM-2B-sft-bf16": Released(
        {
            **_SIZES,
            "architectures": ["MiniCPMForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"},
            "bos_token_id": 1,
            "dim_model_base": 16,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "num_key_value_heads": HEADS,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "scale_depth": 1.4,
            "scale_emb": 12,
            "torch_dtype": "bfloat16",
        },
        _llama(kv=HEADS, head=False),
        file="pytorch_model.bin",
        in_transformers=False,
    ),
    "openbmb/MiniCPM4-8B": Released(
        {
            **_SIZES,
            "architectures": ["MiniCPMForCausalLM"],
            "attention_bias": False,
            "dim_model_base": 16,
            "bos_token_id": 1,
            "eos_token_id": [2, 73440],
            "model_type": "minicpm",
            "mup_denominator": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"rope_type": "longrope", **_LONGROPE, "original_max_position_embeddings": P},
            "scale_depth": 1.4,
            "scale_emb": 12,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        _llama(),
        in_transformers=False,
    ),
    "microsoft/Phi-3.5-mini-instruct": Released(
        {
            **_SIZES,
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
            "bos_token_id": 1,
            "embd_pdrop": 0.0,
            "eos_token_id": 90,
            "hidden_act": "silu",
            "model_type": "phi3",
            "original_max_position_embeddings": 2,
            "pad_token_id": 90,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {**_LONGROPE, "type": "longrope"},
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {**_PHI3_SHAPES, "lm_head.weight": (V, H)},
    ),
    "microsoft/Phi-4-mini-instruct": Released(
        {
            **_SIZES,
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 199999,
            "eos_token_id": 90,
            "pad_token_id": 90,
            "full_attn_mod": 1,
            "hidden_act": "silu",
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "model_type": "phi3",
            "original_max_position_embeddings": 2,
            "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [1.0 + i / 4 for i in range(6)],
                "short_factor": [1.0] * 6,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        _PHI3_SHAPES,
    ),
    "microsoft/Phi-3.5-MoE-instruct": Released(
        {
            **_SIZES,
            "architectures": ["PhiMoEForCausalLM"],
            "attention_bias": True,
            "auto_map": {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"},
            "hidden_act": "silu",
            "hidden_dropout": 0.0,
            "input_jitter_noise": 0.01,
            "lm_head_bias": True,
            "model_type": "phimoe",
            "num_experts_per_tok": 2,
            "num_local_experts": E,
            "original_max_position_embeddings": 2,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                **_LONGROPE,
                "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 2,
                "short_mscale": 1.243163121016122,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.0,
            "router_jitter_noise": 0.01,
            "sliding_window": P,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        {
            **_llama(mlp=False, bias=("q_proj", "k_proj", "v_proj", "o_proj")),
            **_norms(*_BIASED_LAYER_NORMS, bias=True),
            "model.layers.*.block_sparse_moe.gate.weight": (E, H),
            **_matrices("model.layers.*.block_sparse_moe.experts.#.", _MIXTRAL_EXPERT),
            "lm_head.bias": (V,),
        },
        in_transformers=False,
    ),
}
