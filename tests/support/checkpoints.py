"""Small random checkpoints in the formats of the real ones, for all tests: no download, a few hundred KB each.

Each family has a function that fills a folder (config.json, generation_config.json, safetensors, tokenizer) and
returns it; `changes` are fields of its configuration. `write_gguf` turns a folder of a Llama, Qwen or Gemma into a GGUF
file. The tokenizer is a byte-level BPE trained on a few sentences.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from raylm.model_files.source import locate
from tests.support import gguf_kinds
from tests.support.more_families import KINDS, LEFT_OUT, Always, Kind

_FILE, _REFERENCE = "model.safetensors", "reference"
VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|end|>")
BOS, EOS, END = range(3)
"""<|eos|> ends a text, <|end|> a turn; both are in generation_config.json."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A small model answers small questions, one token at a time.",
    "Paged attention keeps the keys and values of a text in blocks.",
    "Grüße aus Köln, naïve café, 東京 and 😀 are text as well.",
)
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}


ERNIE_EXPERTS = {"moe_num_experts": 4, "moe_intermediate_size": 32, "moe_k": 2}
"""Of an Ernie4_5_MoeForCausalLM."""


def of_transformers(name: str, folder: Path, **changes: object) -> Path:
    """A model of transformers by its class's name, of a family that raylm need not have."""
    model_class = getattr(transformers, name)
    return _save(model_class, model_class.config_class, folder, changes)


def llama(folder: Path, **changes: object) -> Path:
    """A Llama with grouped queries and an untied head."""
    return _save(LlamaForCausalLM, LlamaConfig, folder, changes)


def mistral(folder: Path, **changes: object) -> Path:
    """A Mistral whose layers all have a sliding window of 8 tokens."""
    return _save(MistralForCausalLM, MistralConfig, folder, {"sliding_window": 8, **changes})


def qwen2(folder: Path, **changes: object) -> Path:
    """A Qwen2: biases on queries, keys and values, a tied head."""
    return _save(Qwen2ForCausalLM, Qwen2Config, folder, {"tie_word_embeddings": True, **changes})


def qwen3(folder: Path, **changes: object) -> Path:
    """A Qwen3: normed queries and keys, heads larger than hidden_size / num_heads."""
    return _save(Qwen3ForCausalLM, Qwen3Config, folder, {"head_dim": 32, "tie_word_embeddings": True, **changes})


def gemma3(folder: Path, **changes: object) -> Path:
    """A Gemma 3 (text) with a global layer after every two local ones of window 8."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    fields = {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 8, "query_pre_attn_scalar": 24}
    return _save(Gemma3ForCausalLM, Gemma3TextConfig, folder, {**fields, **changes})


def gemma(folder: Path, **changes: object) -> Path:
    """A Gemma: norms that count from 1."""
    return _save(GemmaForCausalLM, GemmaConfig, folder, changes)


def gemma2(folder: Path, **changes: object) -> Path:
    """A Gemma 2 with local layers of window 8 and global ones in turns, and caps that are felt."""
    fields = {"sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5}
    return _save(Gemma2ForCausalLM, Gemma2Config, folder, {**fields, "final_logit_softcapping": 2.0, **changes})


def ministral(folder: Path, **changes: object) -> Path:
    """A Ministral whose second layer is global, the others local ones of window 8."""
    count = changes.get("num_hidden_layers", _SIZES["num_hidden_layers"])
    assert isinstance(count, int)
    kinds = ["sliding_attention"] * count
    kinds[1] = "full_attention"
    return _save(MinistralForCausalLM, MinistralConfig, folder, {"sliding_window": 8, "layer_types": kinds, **changes})


def ministral3(folder: Path, **changes: object) -> Path:
    """A Ministral 3 whose queries grow every 16 positions."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 16}
    fields = {"rope_parameters": {**rope, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}}
    return _save(Ministral3ForCausalLM, Ministral3Config, folder, {**fields, **changes})


def granite(folder: Path, **changes: object) -> Path:
    """A Granite whose multipliers are all felt."""
    fields = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1}
    return _save(GraniteForCausalLM, GraniteConfig, folder, {**fields, "logits_scaling": 4.0, **changes})


def smollm3(folder: Path, **changes: object) -> Path:
    """A SmolLM3 of which every second layer knows no positions."""
    return _save(SmolLM3ForCausalLM, SmolLM3Config, folder, {"no_rope_layer_interval": 2, **changes})


def phi3(folder: Path, **changes: object) -> Path:
    """A Phi-3 with a sliding window of 8 tokens."""
    return _save(Phi3ForCausalLM, Phi3Config, folder, {"sliding_window": 8, **changes})


def exaone4(folder: Path, **changes: object) -> Path:
    """An EXAONE 4 with a global layer, which knows no positions, behind two local ones of window 8."""
    fields = {"sliding_window": 8, "sliding_window_pattern": 3}
    return _save(Exaone4ForCausalLM, Exaone4Config, folder, {**fields, **changes})


def starcoder2(folder: Path, **changes: object) -> Path:
    """A StarCoder2 with a sliding window of 8 tokens."""
    return _save(Starcoder2ForCausalLM, Starcoder2Config, folder, {"sliding_window": 8, "head_dim": None, **changes})


def stablelm(folder: Path, **changes: object) -> Path:
    """A StableLM, which rotates a quarter of each head."""
    return _save(StableLmForCausalLM, StableLmConfig, folder, {"head_dim": None, **changes})


def bloom(folder: Path, **changes: object) -> Path:
    """A BLOOM: linear biases, LayerNorms, no groups, heads of hidden_size / num_heads and a tied head."""
    fields = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": True}
    return _save(BloomForCausalLM, BloomConfig, folder, {**fields, **changes})


def mimo(folder: Path, **changes: object) -> Path:
    """A MiMo: an untied Qwen2 with a layer for multi-token prediction."""
    _save(Qwen2ForCausalLM, Qwen2Config, folder, changes)
    config = json.loads((folder / "config.json").read_text())
    size, own = config["hidden_size"], "model.mtp_layers.0."
    tensors = load_file(folder / _FILE)
    # Its layer has the shapes of the base's.
    layer = {name: t for name, t in tensors.items() if name.startswith("model.layers.0.")}
    shapes = {name.replace("model.layers.0.", own): tensor.shape for name, tensor in layer.items()}
    shapes |= {f"{own}{norm}_layernorm.weight": (size,) for norm in ("token", "hidden", "final")}
    shapes[own + "input_proj.weight"] = (size, 2 * size)
    save_file(tensors | _random(shapes, seed=1), folder / _FILE)
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _of_kind(kind: Kind, folder: Path, **changes: object) -> Path:
    """Where a family is stored in its own way, the folder `reference` has it as transformers reads it."""
    fields = {name: value for name, value in {**_SIZES, **kind.fields, **changes}.items() if value is not LEFT_OUT}
    if isinstance(kinds := fields.get("layer_types"), list):
        count = fields["num_hidden_layers"]
        fields["layer_types"] = (kinds * count)[:count]
    config = CONFIG_MAPPING[kind.model_type](**fields)
    if kind.stored is None:
        return _save_model(AutoModelForCausalLM.from_config, config, folder)
    _save_model(AutoModelForCausalLM.from_config, config, folder / _REFERENCE)
    write_tokenizer(folder)
    values = json.loads((folder / _REFERENCE / "config.json").read_text())
    tensors = kind.stored.tensors(load_file(folder / _REFERENCE / _FILE), values)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _FILE)
    values |= {"architectures": [kind.stored.architecture], **kind.stored.fields(values)}
    (folder / "config.json").write_text(json.dumps(values))
    shutil.copy(folder / _REFERENCE / "generation_config.json", folder)
    return folder


FAMILIES = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mimo": mimo,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "ministral": ministral,
    "ministral3": ministral3,
    "granite": granite,
    "smollm3": smollm3,
    "phi3": phi3,
    "exaone4": exaone4,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "bloom": bloom,
    **{name: functools.partial(_of_kind, kind) for name, kind in KINDS.items()},
}


def eagle3(folder: Path, target: Path, *, leave_out: tuple[str, ...] = (), **changes: object) -> Path:
    """An EAGLE-3 head for a Llama-like target, as its authors publish them: it has the target's sizes, drafts 200 of
    its tokens, and finds its embedding there. `leave_out`: tensors that the checkpoint lacks."""
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 200}
    config |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], **changes}
    size, heads, kv_heads = (config[f] for f in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim, inner, drafts = config["head_dim"], config["intermediate_size"], config["draft_vocab_size"]
    shapes = {
        "fc.weight": (size, 3 * config.get("target_hidden_size", size)),
        "norm.weight": (size,),
        "lm_head.weight": (drafts, size),
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        **{f"midlayer.{norm}.weight": (size,) for norm in ("hidden_norm", "input_layernorm")},
        "midlayer.post_attention_layernorm.weight": (size,),
    }
    tensors = _random(shapes, seed=2)
    vocab_size = config["vocab_size"]
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randperm(vocab_size, generator=generator)[:drafts].sort().values
    tensors["d2t"] = chosen - torch.arange(drafts)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor for name, tensor in tensors.items() if name not in leave_out}, folder / _FILE)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference(folder: Path) -> PreTrainedModel:
    """The checkpoint in transformers, float32, with attention spelled out. (Of a MiMo the base, which is a Qwen2.)"""
    stored = folder
    if (folder / _REFERENCE).is_dir():
        folder = folder / _REFERENCE
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "mimo":
        config = Qwen2Config(**{**config, "model_type": "qwen2"}, attn_implementation="eager")
        model = Qwen2ForCausalLM(config)
        model.load_state_dict({k: v for k, v in load_file(folder / _FILE).items() if "mtp_layers" not in k})
        return model.eval()
    # Spelled out, transformers adds the biases of Falcon-RW twice.
    attention = "sdpa" if config.get("alibi") else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    if json.loads((stored / "config.json").read_text())["architectures"] == ["DeepseekForCausalLM"]:
        for layer in model.model.layers:
            # Its shared experts are not gated: here, by 1.
            layer.mlp.shared_expert_gate = Always(100.0)
    return model


@functools.cache
def smollm2_reference() -> LlamaForCausalLM:
    """SmolLM2-135M of the demo package in transformers, float32, its tensors decoded by the gguf package alone."""
    reader = gguf.GGUFReader(locate("smollm2-135m").path)

    def value(name: str) -> int | float:
        return reader.fields[f"llama.{name}"].contents()

    num_heads, num_kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    hf_names = {gguf_name: name for name, gguf_name in _gguf_names(config).items()}
    state = {}
    for tensor in reader.tensors:
        # Sixteen long rows decode like many short ones, in fewer calls.
        weight = torch.tensor(gguf.dequantize(tensor.data.reshape(16, -1), tensor.tensor_type))
        weight = weight.view(*reversed(tensor.shape.tolist()))
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = _unpermuted(weight, num_heads if ".attn_q." in tensor.name else num_kv_heads)
        state[hf_names[tensor.name]] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def write_gguf(folder: Path, path: Path, quants: dict[str, gguf.GGMLQuantizationType] | None = None) -> Path:
    """The folder's checkpoint as a GGUF file, with its tokenizer. `quants` gives types to parts of tensor names, such
    as {"ffn_up": Q8_0}; other matrices are F16, vectors F32. Scaling of "llama3" becomes rope_freqs.weight."""
    config = json.loads((folder / "config.json").read_text())
    others = {"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2", **gguf_kinds.ARCHITECTURES}
    arch = others.get(config["model_type"], config["model_type"])
    if config["architectures"] == ["DeepseekForCausalLM"]:
        arch = "deepseek"
    model = reference(folder)
    writer = gguf.GGUFWriter(path, arch)
    _write_fields(writer, model.config)
    if arch == "glm4moe":
        writer.add_nextn_predict_layers(1)
        gguf_kinds.write_prediction_layer(writer, model.config.num_hidden_layers)
    _write_tokenizer(writer, folder)
    names = _gguf_names(model.config)
    if model.config.rope_parameters.get("rope_type") == "llama3":
        dims = torch.arange(0, model.config.head_dim, 2) / model.config.head_dim
        plain = model.config.rope_parameters["rope_theta"] ** -dims
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for name, tensor in gguf_kinds.without_fused_experts(model.state_dict(), model.config.model_type):
        tensor = tensor.squeeze()  # as llama.cpp does
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if arch in gguf_kinds.PAIRED and (".q_proj." in name or ".k_proj." in name):
            heads = model.config.num_attention_heads if ".q_proj." in name else model.config.num_key_value_heads
            tensor = _permuted(tensor, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        kind = gguf.GGMLQuantizationType.F32
        if tensor.ndim > 1:
            parts = names[name].removesuffix(".weight").split(".")  # biases of experts have two dimensions too
            asked = (kind for part, kind in (quants or {}).items() if part == parts[-1])
            kind = next(asked, gguf.GGMLQuantizationType.F16)
        data = gguf_kinds.quantize(tensor.contiguous().numpy(), kind)
        writer.add_tensor(names[name], data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of at most VOCAB_SIZE tokens, with its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": _SIZES["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _save(model_class: type, config_class: type, folder: Path, changes: dict[str, object]) -> Path:
    return _save_model(model_class, config_class(**{**_SIZES, **changes}), folder)


def _save_model(make: Callable[..., PreTrainedModel], config: object, folder: Path) -> Path:
    """With random weights."""
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(config)
        for name, parameter in model.named_parameters():
            # Larger than a fresh model's, and norms that differ from 1: or a mistake would hide in the noise.
            is_norm = name.endswith("norm.weight") or (".ln_" in name and name.endswith("weight"))
            counts_from_1 = config.model_type.startswith(("gemma", "nemotron"))
            offset = 1.0 if is_norm and not counts_from_1 else 0.0
            torch.nn.init.normal_(parameter, mean=offset, std=0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                torch.nn.init.normal_(buffer, std=0.15)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[EOS, END])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _random(shapes: dict[str, tuple[int, ...]], *, seed: int) -> dict[str, torch.Tensor]:
    """Tensors like those that _save() gives a model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.15 + name.endswith("norm.weight")
        for name, shape in shapes.items()
    }


def _gguf_names(config: object) -> dict[str, str]:
    """Names of transformers -> names of llama.cpp, for every tensor that a model of this kind may have."""
    is_behind = config.model_type in gguf_kinds.NORM_BEHIND_ATTENTION
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        **gguf_kinds.PARTS,
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm" if is_behind else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    parts |= {"glm4": gguf_kinds.GLM4_PARTS, "phi3": gguf_kinds.PHI3_PARTS}.get(config.model_type, {})
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for layer in range(config.num_hidden_layers):
        for part, found in parts.items():
            if part == "pre_feedforward_layernorm" and "gemma" not in config.model_type:
                continue
            for kind in ("weight", "bias"):
                names[f"model.layers.{layer}.{part}.{kind}"] = f"blk.{layer}.{found}.{kind}"
        for name, found in gguf_kinds.WHOLE.items():
            names[f"model.layers.{layer}.{name}"] = f"blk.{layer}.{found}"
    return names


def _write_fields(writer: gguf.GGUFWriter, config: object) -> None:
    rope = config.rope_parameters
    # With a layer that predicts one token more.
    writer.add_block_count(config.num_hidden_layers + (config.model_type == "glm4_moe"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    gguf_kinds.write_fields(writer, config)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_file_type(1)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(END)
    writer.add_chat_template(CHAT_TEMPLATE)


def _permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The order of rows in which llama.cpp stores the queries and keys of a Llama."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _unpermuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    return weight.reshape(num_heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
