"""Speculative decoding: who drafts, and how much."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raylm.config.base import FrozenConfig

SpeculationMethod = Literal["none", "ngram", "suffix"]


class SpeculationConfig(FrozenConfig):
    """Drafts of a request's next tokens, several of which a step verifies at once. They change no output: a draft is
    kept where it is the token that is sampled anyway."""

    method: SpeculationMethod = "none"
    """ngram copies from an earlier place of the request's own text; suffix predicts from the counts of that text and of
    recent outputs of other requests of the same tenant and cache_salt."""
    num_drafts: int = Field(default=7, ge=1, le=15)
    """Drafts that a request verifies in a step at most. How many it does is measured: by how many are accepted, and by
    what they cost."""
    min_n: int = Field(default=2, ge=1, le=32)
    """Tokens at the text's end that must have occurred before, for a draft to be made."""
    max_n: int = Field(default=4, ge=1, le=32)
    """ngram: of matches of so many tokens and more the most recent one is taken."""

    @model_validator(mode="after")
    def _orders(self) -> SpeculationConfig:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n ({self.min_n}) must be at most max_n ({self.max_n})")
        return self
