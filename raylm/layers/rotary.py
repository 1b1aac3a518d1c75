"""Rotary position embedding: the table of cosines and sines (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raylm.layers.rope_settings import RopeSettings


def inverse_frequencies(settings: RopeSettings, head_dim: int) -> Tensor:
    """The angle that one position adds, for each pair of dimensions: float32 [head_dim / 2]."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (settings.theta ** (steps / head_dim))
    if settings.kind == "linear":
        return frequencies / settings.factor
    if settings.kind == "factors":
        return frequencies / torch.tensor(settings.factors, dtype=torch.float32)
    if settings.kind == "llama3":
        return _llama3(frequencies, settings)
    return frequencies


def rotary_table(settings: RopeSettings, *, head_dim: int, max_position: int, device: torch.device) -> Tensor:
    """cos_sin of ops.rotary: float32 [max_position, settings.size(head_dim)], cosines first. Sixteen bits would blur
    far positions."""
    size = settings.size(head_dim)
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(settings, size))
    table = torch.empty(max_position, size, dtype=torch.float32)
    torch.cos(angles, out=table[:, : size // 2])
    torch.sin(angles, out=table[:, size // 2 :])
    return table.to(device)


def _llama3(frequencies: Tensor, settings: RopeSettings) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = settings.low_freq_factor, settings.high_freq_factor
    kept = ((settings.original_max_position / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / settings.factor + kept * frequencies
