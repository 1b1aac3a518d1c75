"""Speculative decoding: who drafts, and how much."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from raylm.config.base import FrozenConfig

SpeculationMethod = Literal["none", "grammar", "ngram", "suffix", "draft_model", "eagle3", "mtp"]
_TAKES_MODEL = ("draft_model", "eagle3")
_ON_DEVICE = (*_TAKES_MODEL, "mtp")
ON_HOST: tuple[str, ...] = tuple(method for method in get_args(SpeculationMethod) if method not in _ON_DEVICE)
"""Methods that draft without a model on the workers' devices."""


class SpeculationConfig(FrozenConfig):
    """Drafts of a request's next tokens, several of which a step verifies at once. They change no output: a draft is
    kept where it is the token that is sampled anyway."""

    method: SpeculationMethod = "none"
    """grammar drafts what structured output forces, such as names of properties, and every other method does that too.
    ngram copies from an earlier place of the request's own text; suffix predicts from the counts of that text and of
    recent outputs of other requests of the same tenant and cache_salt. The others draft on the device, by a smaller
    model of the same tokenizer, an EAGLE-3 head (arXiv:2503.01840) or the model's own layer for multi-token prediction
    (MiMo); they take memory for their weights and for their part of each token's cache."""
    model: str | None = None
    """draft_model: the smaller model; eagle3: the head's folder. As model.path, or a model of the hub at a revision:
    owner/name@revision. None for the other methods."""
    num_drafts: int = Field(default=7, ge=1, le=15)
    """Drafts that a request verifies in a step at most. How many it does is measured: by how many are accepted, and by
    what they cost."""
    min_n: int = Field(default=2, ge=1, le=32)
    """ngram and suffix: tokens at the text's end that must have occurred before, for a draft to be made. The other
    methods do not read it."""
    max_n: int = Field(default=4, ge=1, le=32)
    """ngram alone: of matches of so many tokens and more the most recent one is taken."""

    @property
    def most(self) -> int:
        """Drafts that a row verifies in a step at most."""
        return 0 if self.method == "none" else self.num_drafts

    @property
    def on_device(self) -> bool:
        """Whether the workers draft, by a model of their own."""
        return self.method in _ON_DEVICE

    @property
    def reads_hidden_states(self) -> bool:
        """Whether drafts come from hidden states of the model."""
        return self.method in ("eagle3", "mtp")

    @model_validator(mode="after")
    def _model_goes_with_method(self) -> SpeculationConfig:
        if self.method in _TAKES_MODEL and self.model is None:
            raise ValueError(f"model is missing: method {self.method} needs the path of what drafts")
        if self.method not in _TAKES_MODEL and self.model is not None:
            raise ValueError(f"model is {self.model!r}, but method {self.method} takes none")
        return self

    @model_validator(mode="after")
    def _orders(self) -> SpeculationConfig:
        if self.method == "ngram" and self.min_n > self.max_n:
            raise ValueError(f"min_n ({self.min_n}) must be at most max_n ({self.max_n}) with method ngram")
        return self
