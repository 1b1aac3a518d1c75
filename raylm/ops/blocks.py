"""Products with quantised GGUF weights, which stay as stored.

A weight [N, K] of a block type is a uint8 tensor [N, K / values * bytes]: the rows' blocks as in the file. Rows may be
strided, their bytes are contiguous. `kind` is GGML's number of the type (gguf.GGMLQuantizationType). The compiled
kernels quantise x to 16 bits with a scale for every 32 values; everything else is in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from raylm.ops import block_fallback, library  # noqa: F401  (registers the schemas)
from raylm.ops.experts import ACTIVATIONS

_block_linear: Callable[..., Tensor] = torch.ops.raylm.block_linear.default
_block_gated_linear: Callable[..., Tensor] = torch.ops.raylm.block_gated_linear.default
_block_experts: Callable[..., Tensor] = torch.ops.raylm.block_experts.default
_decode_blocks: Callable[..., Tensor] = torch.ops.raylm.decode_blocks.default
_block_kernels: Callable[..., bool] = torch.ops.raylm.block_kernels.default


def block_linear(x: Tensor, blocks: Sequence[Tensor], kinds: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the transposes of one or more weights, side by side, plus bias; returns [..., sum of N].

    `blocks` and `kinds` have an entry for each weight, for instance q, k and v: kinds may differ, and x is quantised
    once. `bias` [sum of N] and the result are of x's type.
    """
    if not _all_have_kernels(x, kinds):
        return block_fallback.block_linear(x, list(blocks), list(kinds), bias)
    return _block_linear(x, blocks, kinds, bias)


def block_gated_linear(
    x: Tensor,
    blocks: Sequence[Tensor],
    kinds: Sequence[int],
    activation: Literal["silu", "gelu_tanh"],
    bias: Tensor | None = None,
) -> Tensor:
    """act(gate) * up, where gate and up are products of x [..., K] with the two weights [I, K] of `blocks`, gate first,
    and bias is [2I]; returns [..., I]. Gate and up stay in float32 until the result is rounded to x's type."""
    if not _all_have_kernels(x, kinds):
        return block_fallback.block_gated_linear(x, list(blocks), list(kinds), bias, activation == "gelu_tanh")
    return _block_gated_linear(x, blocks, kinds, bias, activation == "gelu_tanh")


def block_experts(
    x: Tensor,
    blocks: Sequence[Tensor],
    kinds: Sequence[int],
    weights: Tensor,
    chosen: Tensor,
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"],
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """As ops.experts, of weights in blocks: gate and up [E, I, bytes], down [E, H, bytes], each of a kind of its own.

    Only experts that a token goes to are read. Their products are computed as block_linear's, and rounded to x's dtype.
    """
    code = ACTIVATIONS.index(activation)
    if not _all_have_kernels(x, kinds):
        return block_fallback.block_experts(
            x, list(blocks), list(kinds), weights, chosen, gate_up_bias, down_bias, code, limit
        )
    return _block_experts(x, blocks, kinds, weights, chosen, gate_up_bias, down_bias, code, limit)


def decode_blocks(blocks: Tensor, kind: int) -> Tensor:
    """The float32 values [R, K] of blocks [R, bytes], equal to the bit to what the gguf package decodes."""
    if not _has_kernels(blocks.device.type, kind):
        return block_fallback.decode_blocks(blocks, kind)
    return _decode_blocks(blocks, kind)


def block_kernels(like: Tensor, kind: int) -> bool:
    """Whether the extension has kernels for blocks of this kind on the device of `like`. Without them the functions
    above decode the weights at every call, which is far slower than products with weights decoded once."""
    return _block_kernels(like, kind)


def _all_have_kernels(x: Tensor, kinds: Sequence[int]) -> bool:
    device_type = x.device.type
    for kind in kinds:  # noqa: SIM110  (a generator costs as much as the operator's own checks)
        if not _has_kernels(device_type, kind):
            return False
    return True


@functools.cache
def _has_kernels(device_type: str, kind: int) -> bool:
    return _block_kernels(torch.empty(0, device=device_type), kind)
