"""How types of numbers are called where people read them."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16 ..."""
    return str(dtype).removeprefix("torch.")
