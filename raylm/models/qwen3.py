"""Qwen3: queries and keys are normed head by head."""

from __future__ import annotations

from raylm.models.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """The shared decoder as it is: what differs is in ArchConfig."""
