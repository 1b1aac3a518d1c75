"""Gated activations: act(gate) * up over the fused output of gate and up."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from raylm import ops

GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_tanh_mul}
"""Activation -> the function from [T, 2 * I] (gate, then up) to [T, I]."""
