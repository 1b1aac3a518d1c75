"""Products of 8-bit floating-point numbers, where each row of both matrices has a scale of its own.

Rows of activations are quantised where they are made: behind a norm, a gated activation, or by themselves. A number is
its code, float8_e4m3fn, times its row's scale, which is the largest magnitude of the row / 448.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from raylm.ops import extension, library  # noqa: F401  (registers the schemas)
from raylm.ops.scaled_fallback import CODES as CODES

_scale_rows: Callable[..., tuple[Tensor, Tensor]] = torch.ops.raylm.scale_rows.default
_scaled_rms_norm: Callable[..., tuple[Tensor, Tensor]] = torch.ops.raylm.scaled_rms_norm.default
_scaled_gated: Callable[..., tuple[Tensor, Tensor]] = torch.ops.raylm.scaled_gated.default
_scaled_gated_linear: Callable[..., tuple[Tensor, Tensor]] = torch.ops.raylm.scaled_gated_linear.default
_scaled_linear: Callable[..., Tensor] = torch.ops.raylm.scaled_linear.default

_SIZE_UNIT = 16
"""Of rows and columns of a weight, in torch's library."""


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """T rows of K numbers."""

    codes: Tensor
    """float8_e4m3fn [T, K], contiguous."""
    scales: Tensor
    """float32 [T]."""

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> ScaledRows:
        return ScaledRows(self.codes[rows], self.scales[rows])


Rows = Tensor | ScaledRows
"""What a linear layer multiplies its weight by."""


def scale_rows(x: Tensor) -> ScaledRows:
    """The rows of x [T, K], rounded to the nearest codes. A row that holds a NaN or an infinity is NaN after a
    product."""
    return ScaledRows(*_scale_rows(x))


def scaled_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> ScaledRows:
    """scale_rows of rms_norm, or of add_rms_norm where there is a residual: x [T, H] is added to it in place."""
    return ScaledRows(*_scaled_rms_norm(x, residual, weight, eps))


def scaled_gated(x: Tensor, activation: Literal["silu", "gelu_tanh"]) -> ScaledRows:
    """scale_rows of act(first half) * second half of x [T, 2I]: I numbers a row."""
    return ScaledRows(*_scaled_gated(x, activation == "gelu_tanh"))


def scaled_linear(
    x: ScaledRows,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    frozen: bool = False,
) -> Tensor:
    """x [T, K] times the transpose of the weight (float8_e4m3fn [N, K], `scales` float32 [N]), plus bias [N]: [T, N].

    bias and result are of `dtype`. Sums are in float32; where wgmma adds up, which is everywhere but in the kernel for
    few rows, some 14 bits of them are kept. Results of float16 and more than 64 rows pass through bfloat16.
    `frozen`: as in linear, of the weight, its scales and the bias.
    """
    return _scaled_linear(x.codes, x.scales, weight, scales, bias, dtype, frozen)


def scaled_gated_linear(
    x: ScaledRows,
    weight: Tensor,
    scales: Tensor,
    activation: Literal["silu", "gelu_tanh"],
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    frozen: bool = False,
) -> ScaledRows:
    """scaled_gated of scaled_linear, where one kernel may do the product with its activation: T rows of N / 2 numbers.
    Gate and up are rounded to `dtype` before the activation, or not where they have it in one kernel."""
    gelu_tanh = activation == "gelu_tanh"
    return ScaledRows(*_scaled_gated_linear(x.codes, x.scales, weight, scales, bias, dtype, gelu_tanh, frozen))


def takes_scaled(rows: int, columns: int, device: torch.device) -> bool:
    """Whether scaled_linear has kernels for weights of that many rows and columns on the device: on Hopper GPUs,
    where both are multiples of 16. Elsewhere torch's operators do it in float32."""
    if device.type != "cuda" or rows % _SIZE_UNIT or columns % _SIZE_UNIT:
        return False
    has_kernels = "scaled_linear" in extension.load().ops.get("cuda", ())
    return has_kernels and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
