"""raylm.ops.scaled in terms of torch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

CODES = torch.float8_e4m3fn
_MOST = torch.finfo(CODES).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Of a row of zeros."""


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scales = (wide.abs().amax(-1) / _MOST).clamp(min=_LEAST_SCALE)
    # Rounding may go past the largest code, which no NaN and no infinity has.
    codes = (wide * (1 / scales).unsqueeze(-1)).clamp(-_MOST, _MOST).to(CODES)
    return codes, scales


def codes_of(x: Tensor, scale: float) -> Tensor:
    """The codes nearest to x / scale; what is past the largest becomes that."""
    return (x.float() * (1 / scale)).clamp(-_MOST, _MOST).to(CODES)


def scaled_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    frozen: bool = False,
) -> Tensor:
    sums = x.float() @ weight.float().t() * x_scales.unsqueeze(-1) * scales
    return (sums if bias is None else sums + bias.float()).to(dtype)
