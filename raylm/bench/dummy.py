"""Models without weights to measure with (load_format dummy): one of no cost, for the stack around it, and the shapes
of public ones. Their tokenizer has one token a byte, and a word of its own for every other id: what a random model says
is text, so that each token reaches a client as it would from a trained one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from raylm.bench.shapes import QUANTISED, SHAPES, shape_named
from raylm.errors import ConfigError

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_EOS = "<|end|>"
_VOCAB = len(_BYTES) + 1
_HIDDEN = 64


def write_dummy(folder: Path, *, num_layers: int = 1, max_position: int = 8192) -> Path:
    """Write a folder with config.json and a tokenizer; load it with load_format dummy."""
    _write_tokenizer(folder, _VOCAB)
    _write(folder / "config.json", _config(num_layers, max_position))
    return folder


def write_shape(name: str, folder: Path, *, quantised: str | None = None) -> Path:
    """Write a folder with the config.json of a public model, one of SHAPES in any case, or of a checkpoint of it that
    is `quantised` as one of QUANTISED. Raises ConfigError."""
    if (known := shape_named(name)) is None:
        raise ConfigError(f"there is no shape {name!r}; there are: {', '.join(SHAPES)}")
    _write_tokenizer(folder, int(str(SHAPES[known]["vocab_size"])))
    config = {**SHAPES[known], "torch_dtype": "bfloat16", "hidden_act": "silu"}
    if quantised is not None:
        config["quantization_config"] = QUANTISED[quantised]
    _write(folder / "config.json", config)
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
