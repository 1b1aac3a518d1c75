"""A model's own sampling: what a request that leaves a field out is sampled with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pydantic import Field

from raylm.config.base import FrozenConfig


class SamplingConfig(FrozenConfig):
    """Defaults of requests. Where one is null, what the model's authors advise (raylm knows it of the demo model), else
    OpenAI's default."""

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


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request says nothing, each field a number. OpenAI's defaults, unless given."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, config: SamplingConfig, advised: SamplingDefaults) -> SamplingDefaults:
        """What is configured, else `advised`."""
        return cls(**{**asdict(advised), **config.model_dump(exclude_none=True)})

    def fields(self) -> dict[str, float]:
        """By their names in SamplingParams and in OpenAI's requests."""
        return asdict(self)
