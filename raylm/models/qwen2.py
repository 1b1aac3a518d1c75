"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from raylm.models.decoder import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """The shared decoder as it is: what differs is in ArchConfig."""
