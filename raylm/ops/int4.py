"""Products with weights of 4-bit integers that have a scale and a zero point a group of columns; activations have 16
bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raylm.ops import extension, library  # noqa: F401  (registers the schemas)
from raylm.ops.int4_fallback import PATCH_ROWS

_int4_linear: Callable[..., Tensor] = torch.ops.raylm.int4_linear.default

INT4_GROUPS = (32, 64, 128)
"""Columns of a group that there are kernels for."""
INT4_COLUMNS = 64
"""Of which the columns of a weight are a multiple."""
_HALVES = (torch.float16, torch.bfloat16)


def int4_linear(x: Tensor, weight: Tensor, group: int, bias: Tensor | None = None, *, frozen: bool = False) -> Tensor:
    """x [T, K] times the transpose of the weight, plus bias [N]: [T, N].

    weight: uint8 [N / 16, bytes], as pack_int4 makes it of groups of `group` columns. Of up to 32 rows, products of a
    group are summed before they are scaled, all in float32; of more, scales and the weight's numbers are rounded to x's
    dtype first, of more than 1,024 the numbers alone. `frozen`: as in linear, of weight and bias.
    """
    return _int4_linear(x, weight, group, bias, frozen)


def takes_int4(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether int4_linear has kernels for weights of that many rows and columns, and activations of `dtype`, on the
    device: on Hopper GPUs, where they are multiples of 16 and 64. Elsewhere torch's operators do it in float32."""
    if device.type != "cuda" or rows % PATCH_ROWS or columns % INT4_COLUMNS or dtype not in _HALVES:
        return False
    has_kernels = "int4_linear" in extension.load().ops.get("cuda", ())
    return has_kernels and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
