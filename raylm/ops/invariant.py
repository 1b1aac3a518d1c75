"""Operators whose results for a row, or for a query, are the same bits whatever else is in the step.

The operators that they stand for are faster: they choose kernels, and with them the order of sums, by the number of
rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raylm.ops import extension, fallback, library  # noqa: F401  (registers the schemas)

_linear: Callable[..., Tensor] = torch.ops.raylm.invariant_linear.default
_attention: Callable[..., Tensor] = torch.ops.raylm.invariant_attention.default
_linear_rows: Callable[..., int] = torch.ops.raylm.linear_rows.default
_experts_kernels: Callable[..., bool] = torch.ops.raylm.experts_kernels.default
_rms_norm: Callable[..., Tensor] = torch.ops.raylm.rms_norm.default
_add_rms_norm: Callable[..., Tensor] = torch.ops.raylm.add_rms_norm.default

_HOPPER_ROWS = 64
"""What linear_rows says where the kernel of tiles is, which invariant_linear runs."""
_COLUMNS = 128
"""The least that this kernel takes."""
_NORM_ROWS = 512
_LONG_ROW = 8192
"""From 1,024 rows of so many bytes on, a GPU's rms_norm has each thread add other parts of a row."""


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, frozen: bool = False) -> Tensor:
    """linear of x [T, K]: each number of the result is summed over K in one order, whatever T is.

    On Hopper GPUs a kernel of raylm's does it for 16-bit numbers, N and K of multiples of 8, K of 128 and more. All
    else is torch's linear of INVARIANT_ROWS rows at a time, the last ones filled up with zeros.
    """
    if x.is_cuda and not _has_kernel(weight):
        return fallback.invariant_linear(x, weight, bias)
    return _linear(x, weight, bias, frozen)


def _has_kernel(weight: Tensor) -> bool:
    """Depends on nothing that changes from step to step."""
    rows, columns = weight.shape
    fits = rows % 8 == 0 and columns % 8 == 0 and columns >= _COLUMNS and weight.stride(0) % 8 == 0
    return fits and weight.data_ptr() % 16 == 0 and _linear_rows(weight) == _HOPPER_ROWS


def invariant_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """paged_attention whose result for a query follows from the query, its position and its sequence's keys and values
    alone: decode and prefill, a whole prompt and chunks of it give the same bits.

    On GPUs all queries go through the kernel for prefill, which reads the keys once for each query head of a sequence
    and does not share one sequence's keys between blocks. Elsewhere torch computes each query by itself.
    """
    return _attention(
        q,
        k_cache,
        v_cache,
        block_table,
        query_start,
        seq_lens,
        max_query_len,
        max_seq_len,
        scale,
        window,
        soft_cap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
    )


def invariant_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """rms_norm of x [..., H], or with a residual [T, H] add_rms_norm of x [T, H], each row's sum in one order."""
    is_short = weight.nbytes < _LONG_ROW
    if is_short or len(x) <= _NORM_ROWS:
        return _rms_norm(x, weight, eps) if residual is None else _add_rms_norm(x, residual, weight, eps)
    parts = x.split(_NORM_ROWS)
    if residual is None:
        return torch.cat([_rms_norm(part, weight, eps) for part in parts])
    pairs = zip(parts, residual.split(_NORM_ROWS), strict=True)
    return torch.cat([_add_rms_norm(part, of_part, weight, eps) for part, of_part in pairs])


def invariant_experts(num_experts: int, hidden_size: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `experts` of such sizes is an operator of this kind: its kernels are, what torch has is not. `size`:
    columns between an expert's products."""
    x, one = torch.empty(1, hidden_size, dtype=dtype, device=device), torch.empty(1, 1, 1, dtype=dtype, device=device)
    return _experts_kernels(x, one.expand(num_experts, hidden_size, size))
