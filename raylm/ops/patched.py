"""A mixture of experts whose weights are codes in patches; activations have 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from raylm.ops import extension, library  # noqa: F401  (registers the schemas)
from raylm.ops.experts import ACTIVATIONS
from raylm.ops.int4_fallback import PATCH_ROWS
from raylm.ops.patches import NUMBERS, Numbers

_patched_experts: Callable[..., Tensor] = torch.ops.raylm.patched_experts.default

_MOST_EXPERTS = 512
_HALVES = {"int4": (torch.float16, torch.bfloat16), "mxfp4": (torch.bfloat16,), "fp8": (torch.bfloat16,)}
"""Types of activations."""


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

    Products of floats of 8 bits are summed over 128 columns before they are scaled; of the others scales and numbers
    are rounded to x's dtype first, which changes none of MXFP4's.
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
    if device.type == "meta":
        return True
    has_kernels = "patched_experts" in extension.load().ops.get("cuda", ())
    return has_kernels and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
