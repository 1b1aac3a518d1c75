"""Settings of the rotary embedding, apart from the tensors made of them: reading a configuration needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "factors", "yarn", "longrope", "dynamic"]


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """How positions turn into angles.

    default: theta ** (-2i / head_dim).
    linear: those divided by `factor` (position interpolation, arXiv:2306.15595).
    llama3: wavelengths over original_max_position / low_freq_factor are stretched by `factor`, those under
    original_max_position / high_freq_factor stay, those between are interpolated (Llama 3.1, arXiv:2407.21783).
    factors: each frequency is divided by its own of `factors` (how GGUF files store llama3).
    yarn: dimensions that turn less than beta_slow times within original_max_position are stretched by `factor`, those
    that turn more than beta_fast times stay, those between are interpolated (YaRN, arXiv:2309.00071).
    longrope: as factors, where sequences may be longer than original_max_position; else by `short_factors` (LongRoPE,
    arXiv:2402.13753).
    dynamic: theta grows with what sequences may have over original_max_position (NTK-aware scaling by the length that
    is possible: keys in a cache cannot turn with a sequence that grows).
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    """The share of each head's dimensions, the first ones, that is rotated at all; `head_dim` above is then their
    number."""
    short_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: the first and the last dimension that are interpolated are whole numbers."""
    attention_factor: float = 1.0
    """Of cosines and sines: so scores grow by its square."""
    short_attention_factor: float | None = None
    """longrope: the one that goes with short_factors, where it is another."""
    query_beta: float = 0.0
    """A rotated query at position p is multiplied by 1 + query_beta * log(1 + floor(p / original_max_position)): so
    attention stays sharp among many keys (Llama 4, Ministral 3)."""

    def size(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def stretches_queries(self, max_position: int) -> bool:
        """Whether any query of a sequence of at most `max_position` tokens is multiplied by more than 1."""
        return self.query_beta > 0 and max_position > self.original_max_position

    def reach(self, max_position: int) -> int:
        """Tokens of a sequence at most; `max_position` is what the model says, perhaps from before it was stretched."""
        if self.kind in ("yarn", "dynamic"):
            return max(max_position, round(self.factor * self.original_max_position))
        return max_position
