"""Llama, and models of its shape (SmolLM2, TinyLlama, Yi ...)."""

from __future__ import annotations

from raylm.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """The shared decoder as it is: what differs is in ArchConfig."""
