"""Rotary position embedding: the table of cosines and sines (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raylm.layers.rope_settings import RopeSettings


def inverse_frequencies(settings: RopeSettings, head_dim: int, max_position: int) -> Tensor:
    """The angle that one position adds, for each pair of dimensions: float32 [head_dim / 2]. `max_position`: tokens of
    a sequence at most."""
    theta, is_long = settings.theta, max_position > settings.original_max_position
    if settings.kind == "dynamic" and is_long:
        stretch = settings.factor * max_position / settings.original_max_position - (settings.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (theta ** (steps / head_dim))
    if settings.kind == "linear":
        return frequencies / settings.factor
    if settings.kind in ("factors", "longrope"):
        factors = settings.factors if settings.kind == "factors" or is_long else settings.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float32)
    if settings.kind == "llama3":
        return _llama3(frequencies, settings)
    if settings.kind == "yarn":
        return _yarn(frequencies, settings, head_dim)
    return frequencies


def rotary_table(settings: RopeSettings, *, head_dim: int, max_position: int, device: torch.device) -> Tensor:
    """cos_sin of ops.rotary: float32 [max_position, settings.size(head_dim)], cosines first. Sixteen bits would blur
    far positions."""
    size = settings.size(head_dim)
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(settings, size, max_position))
    table = torch.empty(max_position, size, dtype=torch.float32)
    torch.cos(angles, out=table[:, : size // 2])
    torch.sin(angles, out=table[:, size // 2 :])
    is_short = max_position <= settings.original_max_position
    factor = settings.short_attention_factor if is_short else None
    if factor is None:
        factor = settings.attention_factor
    if factor != 1.0:
        table *= factor
    return table.to(device)


def query_stretch(settings: RopeSettings, *, max_position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What queries are multiplied by (RopeSettings.query_beta), [max_position, 1, 1]."""
    spans = torch.arange(max_position, device=device) // settings.original_max_position
    return (1 + settings.query_beta * torch.log1p(spans)).to(dtype).view(-1, 1, 1)


def _llama3(frequencies: Tensor, settings: RopeSettings) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = settings.low_freq_factor, settings.high_freq_factor
    kept = ((settings.original_max_position / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / settings.factor + kept * frequencies


def _yarn(frequencies: Tensor, settings: RopeSettings, head_dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        """The one that turns so often within the original context."""
        wavelength = settings.original_max_position / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(settings.theta))

    first, last = dimension(settings.beta_fast), dimension(settings.beta_slow)
    if settings.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return stretched * frequencies / settings.factor + (1 - stretched) * frequencies
