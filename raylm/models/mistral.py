"""Mistral: a Llama whose layers may all have a sliding window."""

from __future__ import annotations

from raylm.models.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """The shared decoder as it is: what differs is in ArchConfig."""
