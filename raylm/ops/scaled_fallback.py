"""raylm.ops.scaled in terms of torch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

CODES = torch.float8_e4m3fn
_MOST = torch.finfo(CODES).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Of a row of zeros."""


def row_scales(x: Tensor, most: float) -> Tensor:
    """Of each row of float32 x [..., K], its largest magnitude / `most`, and a tiny number for zeros: [...]."""
    # As a tensor: on a GPU torch divides by a number as if it were multiplied by another one.
    return (x.abs().amax(-1) / x.new_full((1,), most)).clamp(min=_LEAST_SCALE)


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scales = row_scales(wide, _MOST)
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
