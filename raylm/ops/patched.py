"""Products with weights that are codes in patches, of linear layers and of a mixture of experts; activations have 16
bits, or are rounded to 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from raylm.ops import extension, library  # noqa: F401  (registers the schemas)
from raylm.ops.experts import ACTIVATIONS
from raylm.ops.patches import NUMBERS, PATCH_ROWS, Numbers

_patched_linear: Callable[..., Tensor] = torch.ops.raylm.patched_linear.default
_patched_gated_linear: Callable[..., Tensor] = torch.ops.raylm.patched_gated_linear.default
_patched_experts: Callable[..., Tensor] = torch.ops.raylm.patched_experts.default

PATCHED_UNIT = 64
"""Of which the columns of a linear layer's weight are a multiple."""
_MOST_EXPERTS = 512
_BOTH, _ONE = (torch.float16, torch.bfloat16), (torch.bfloat16,)
_HALVES: dict[Numbers, tuple[torch.dtype, ...]] = {
    "int4": _BOTH,
    "int8": _BOTH,
    "mxfp4": _ONE,
    "fp8": _ONE,
    "affine4": _ONE,
    "affine8": _ONE,
    "nf4": _ONE,
    "mxfp8": _ONE,
    "int8_rows": _BOTH,
    "fp8_rows": _ONE,
}
"""Types of activations."""


def patched_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, numbers: Numbers, group: int, frozen: bool = False
) -> Tensor:
    """x [T, K] times the transpose of the weight, plus bias [N]: [T, N].

    weight: uint8 [N / 16, bytes], patches of `numbers` in groups of `group` columns that share a scale. Of up to 16
    rows, products of a group are summed before they are scaled, in float32. Of more, scales and the weight's numbers
    are rounded to x's dtype; of more than 1,024 the numbers alone, the whole weight before the product. Numbers of
    MXFP4 and MXFP8 need no rounding; those of codes with offsets are rounded however many rows there are. Of
    "int8_rows" and "fp8_rows" x is rounded in place of the weight from 17 or 65 rows on, each row to integers or floats
    of 8 bits with a scale (on a GPU to integers up to 131,072 columns, whose products 32 bits hold).
    `frozen`: as in linear, of weight and bias.
    """
    return _patched_linear(x, weight, bias, NUMBERS.index(numbers), group, frozen)


def patched_gated_linear(
    x: Tensor,
    weight: Tensor,
    activation: Literal["silu", "gelu_tanh"],
    bias: Tensor | None = None,
    *,
    numbers: Numbers,
    group: int,
    frozen: bool = False,
) -> Tensor:
    """act(gate) * up, where gate and up are the halves of patched_linear(x, weight, bias): [T, N / 2].

    N is a multiple of 32. GPUs round gate and up to x's dtype before the activation only with more than 1,024 rows, and
    never where x itself is rounded to 8 bits.
    """
    return _patched_gated_linear(x, weight, bias, activation == "gelu_tanh", NUMBERS.index(numbers), group, frozen)


def takes_patched(numbers: Numbers, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether patched_linear has kernels for weights of that many rows and columns, and activations of `dtype`, on the
    device: on Hopper GPUs, for which the meta device stands, where they are multiples of 16 and 64. Elsewhere torch's
    operators do it in float32."""
    fits = rows % PATCH_ROWS == 0 and columns % PATCHED_UNIT == 0 and dtype in _HALVES[numbers]
    return fits and device.type != "cpu" and (device.type == "meta" or _has_kernels("patched_linear", device))


def patched_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"],
    *,
    numbers: Numbers,
    group: int,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """As ops.experts, of weights in patches, uint8: gate_up [E, 2I / 16, bytes], gate's patches first, and down [E,
    H / 16, bytes]. `numbers` and `group`, columns that share a scale, say what patches hold.

    Scales and numbers are rounded to x's dtype, which changes none of MXFP4's. Of "int8_rows" and "fp8_rows" rows of x,
    and those between the products, are rounded instead from 17 or 65 tokens on, as in patched_linear.
    """
    return _patched_experts(
        x,
        gate_up,
        down,
        weights,
        chosen,
        gate_up_bias,
        down_bias,
        ACTIVATIONS.index(activation),
        limit,
        NUMBERS.index(numbers),
        group,
    )


def takes_patched_experts(
    numbers: Numbers, num_experts: int, hidden: int, size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether patched_experts has kernels for so many experts of that hidden size and columns between their products,
    and activations of `dtype`, on the device: on Hopper GPUs, for which the meta device stands. Torch's operators, for
    tests, unpack all experts in every call."""
    fits = num_experts <= _MOST_EXPERTS and hidden % PATCH_ROWS == 0 and size % PATCH_ROWS == 0
    if device.type == "cpu" or not fits or dtype not in _HALVES[numbers]:
        return False
    return device.type == "meta" or _has_kernels("patched_experts", device)


def _has_kernels(op: str, device: torch.device) -> bool:
    has_kernels = op in extension.load().ops.get("cuda", ())
    return has_kernels and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
