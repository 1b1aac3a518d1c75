"""How requests are generated that leave it open, and what a request may ask for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import Field

from raylm.config.base import FrozenConfig


class SamplingConfig(FrozenConfig):
    """Defaults of requests. Where one is null, generation.defaults says what holds."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    """0 is greedy; OpenAI's default is 1."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches it; 1 keeps all."""
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    """Keep so many tokens, the likeliest; 0 keeps all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Drop tokens less likely than this times the likeliest; 0 drops none."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    """Over 1, against tokens that are in the prompt or the completion already; 1 is off."""


class GenerationConfig(FrozenConfig):
    """What requests may ask of generation, and their defaults."""

    defaults: Literal["model", "neutral"] = "model"
    """Defaults of temperature, top_p, top_k, min_p and repetition_penalty where model.sampling has none. model: those
    of the model's generation_config.json (raylm knows them of the demo model; a GGUF file has none). neutral: OpenAI's
    temperature 1, everything else off."""
    max_logprobs: int = Field(default=20, ge=0, le=1024)
    """Tokens that a request may have reported at each position (logprobs, top_logprobs, prompt_logprobs)."""
    logprobs: Literal["raw", "processed"] = "raw"
    """Log probabilities of sampled tokens: the model's own (raw), or those of the distribution that the token is drawn
    from, after penalties, biases, masks, temperature, top_k, top_p and min_p (processed; a greedy request has those
    before the temperature). Those of prompts and of beams are raw."""
    logits_processors: list[Annotated[str, Field(min_length=1, max_length=256)]] = []
    """User-written logits processors that requests may name, by their names in the entry point group
    raylm.logits_processors. Every worker loads them when it starts."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request says nothing, each field a number. OpenAI's defaults, unless given."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, config: SamplingConfig, advised: SamplingConfig) -> SamplingDefaults:
        """What is configured, else what is advised, else OpenAI's default."""
        return cls(**{**advised.model_dump(exclude_none=True), **config.model_dump(exclude_none=True)})

    def fields(self) -> dict[str, float]:
        """By their names in SamplingParams and in OpenAI's requests."""
        return asdict(self)
