"""Settings of the rotary embedding, apart from the tensors made of them: reading a configuration needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "factors"]


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """How positions turn into angles.

    default: theta ** (-2i / head_dim). linear: those divided by `factor` (position interpolation, arXiv:2306.15595).
    llama3: wavelengths over original_max_position / low_freq_factor are stretched by `factor`, those under
    original_max_position / high_freq_factor stay, those between are interpolated (Llama 3.1, arXiv:2407.21783).
    factors: each frequency is divided by its own of `factors` (how GGUF files store llama3).
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

    def size(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * self.partial_rotary_factor)
