"""Formats of weights: those that are read, and those of other engines, refused with the way to convert them."""

from __future__ import annotations

from typing import Literal

LoadFormat = Literal["auto", "safetensors", "pt", "mistral", "gguf", "dummy"]

_SAVE = "write safetensors from it with transformers (save_pretrained) and use auto"
_REFUSED = {
    "tensorizer": f"raylm does not read tensorizer's files: {_SAVE}",
    "runai_streamer": "raylm needs no streamer: auto reads safetensors with several threads, from a folder or a URL",
    "runai_streamer_sharded": "a checkpoint cut for its ranks is not read: take the original one, and auto; every rank "
    "reads its own part alone",
    "sharded_state": "a checkpoint cut for its ranks is not read: take the original one, and auto; every rank reads "
    "its own part alone",
    "npcache": "raylm keeps no copy of the weights: pt reads pytorch_model.bin as it is",
    "bitsandbytes": "raylm does not quantise by bitsandbytes; checkpoints that it has quantised are read by auto, and "
    "so are the original ones",
    "fastsafetensors": "auto reads safetensors with several threads",
    "instanttensor": "auto reads safetensors with several threads",
    "hf": "auto is the same",
}


def known_format(value: object) -> object:
    """The value, if no other engine's. Raises ValueError with what to do instead."""
    if isinstance(value, str) and value in _REFUSED:
        raise ValueError(f"{value} is not read: {_REFUSED[value]}")
    return value
