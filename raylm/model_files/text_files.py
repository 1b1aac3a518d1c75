"""Which files of a model's folder say what the model and its tokenizer are: all but its weights."""

from __future__ import annotations

from pathlib import Path

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "consolidated.safetensors.index.json",
)
FALLBACK_FILES = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tiktoken.model",
    "tekken.json",
)
"""What a tokenizer is made from where there is no tokenizer.json."""


def has_tokenizer(folder: Path) -> bool:
    """Whether nothing of FALLBACK_FILES is needed."""
    return (folder / "tokenizer.json").is_file()
