"""Products with quantised GGUF weights in terms of numpy and torch.

The gguf package decodes the blocks; products are in float32. `kind` is GGML's number of a block type
(gguf.GGMLQuantizationType).
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.ops.experts import experts


def block_linear(x: Tensor, blocks: list[Tensor], kinds: list[int], bias: Tensor | None) -> Tensor:
    return _product(x, blocks, kinds, bias).to(x.dtype)


def block_gated_linear(
    x: Tensor, blocks: list[Tensor], kinds: list[int], bias: Tensor | None, gelu_tanh: bool
) -> Tensor:
    gate, up = _product(x, blocks, kinds, bias).chunk(2, dim=-1)
    activated = F.gelu(gate, approximate="tanh") if gelu_tanh else F.silu(gate)
    return (activated * up).to(x.dtype)


def block_experts(
    x: Tensor,
    blocks: list[Tensor],
    kinds: list[int],
    weights: Tensor,
    chosen: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    limit: float,
) -> Tensor:
    if not chosen.numel():
        return torch.zeros_like(x)
    used, places = chosen.unique(return_inverse=True)
    gate, up, down = (
        decode_blocks(part[used].flatten(0, 1), kind).unflatten(0, (len(used), -1))
        for part, kind in zip(blocks, kinds, strict=True)
    )
    biases = (None if bias is None else bias[used].float() for bias in (gate_up_bias, down_bias))
    return experts(x.float(), torch.cat([gate, up], dim=1), down, weights, places, *biases, activation, limit).to(
        x.dtype
    )


def decode_blocks(blocks: Tensor, kind: int) -> Tensor:
    values, num_bytes = block_size(kind)
    rows, row_bytes = blocks.shape
    if row_bytes % num_bytes:
        name = gguf.GGMLQuantizationType(kind).name
        raise ValueError(
            f"blocks has rows of {row_bytes} bytes, must be a multiple of the {num_bytes} of a {name} block"
        )
    if not blocks.numel():
        return blocks.new_empty(rows, row_bytes // num_bytes * values, dtype=torch.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # scales may be infinite or NaN, as for kernels
        decoded = gguf.dequantize(blocks.contiguous().cpu().numpy(), gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(decoded).to(blocks.device)


def block_kernels(like: Tensor, kind: int) -> bool:
    return False


def block_size(kind: int) -> tuple[int, int]:
    """Values and bytes of one block. Raises ValueError for a number that is no GGML type."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]


def _product(x: Tensor, blocks: list[Tensor], kinds: list[int], bias: Tensor | None) -> Tensor:
    weight = torch.cat([decode_blocks(part, kind) for part, kind in zip(blocks, kinds, strict=True)])
    return F.linear(x.float(), weight, bias.float() if bias is not None else None)
