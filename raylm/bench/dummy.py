"""Models without weights to measure with (load_format dummy): one of no cost, for the stack around it, and the shapes
of public ones. Their tokenizer has one token a byte, and a word of its own for every other id: what a random model says
is text, so that each token reaches a client as it would from a trained one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from raylm.errors import ConfigError

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_EOS = "<|end|>"
_VOCAB = len(_BYTES) + 1
_HIDDEN = 64

_LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}
"""Name -> config.json, as the models' publishers have it."""


def write_dummy(folder: Path, *, num_layers: int = 1, max_position: int = 8192) -> Path:
    """Write a folder with config.json and a tokenizer; load it with load_format dummy."""
    _write_tokenizer(folder, _VOCAB)
    _write(folder / "config.json", _config(num_layers, max_position))
    return folder


def write_shape(name: str, folder: Path) -> Path:
    """Write a folder with the config.json of a public model, one of SHAPES. Raises ConfigError."""
    if name not in SHAPES:
        raise ConfigError(f"there is no shape {name!r}; there are: {', '.join(SHAPES)}")
    _write_tokenizer(folder, int(str(SHAPES[name]["vocab_size"])))
    _write(folder / "config.json", {**SHAPES[name], "torch_dtype": "bfloat16", "hidden_act": "silu"})
    return folder


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate(_BYTES)} | {_EOS: _VOCAB - 1}
    vocab |= {f"\u0120w{index}": index for index in range(_VOCAB, vocab_size)}  # \u0120 stands for a space.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    _write(folder / "tokenizer_config.json", {"eos_token": _EOS, "chat_template": template})


def _config(num_layers: int, max_position: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": _VOCAB - 1,
        "torch_dtype": "float32",
    }


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
