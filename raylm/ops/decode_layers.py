"""raylm::decode_layers in terms of the other operators: to the bit what the compiled kernel computes, where these have
compiled kernels too."""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN = -1
"""The kind of a weight that is a matrix of numbers; others have GGML's number of the type of their blocks."""


def decode_layers(
    residual: Tensor,
    weights: list[Tensor],
    kinds: list[int],
    norms: list[Tensor],
    head_norms: list[Tensor],
    biases: list[Tensor],
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    cos_sin: Tensor,
    eps: float,
    scale: float,
    gelu_tanh: bool,
) -> None:
    op = torch.ops.raylm
    rows, head_dim = len(residual), k_caches[0].shape[3]
    query_start = torch.arange(rows + 1, dtype=torch.int32, device=residual.device)
    longest = block_table.shape[1] * k_caches[0].shape[1]
    left = _Left(weights, kinds)
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        x = op.rms_norm(residual, norms[2 * layer], eps)
        heads = left.product(x, 3, biases[layer] if biases else None).view(rows, -1, head_dim)
        num_kv_heads = k_cache.shape[2]
        q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        q_norm, k_norm = head_norms[2 * layer : 2 * layer + 2] if head_norms else (None, None)
        op.rope_store(q, k, v, q_norm, k_norm, eps, positions, cos_sin, k_cache, v_cache, slot_mapping)
        attended = op.paged_attention(
            q, k_cache, v_cache, block_table, query_start, seq_lens, 1, longest, scale, 0, 0.0, None
        )
        x = op.add_rms_norm(left.product(attended.view(rows, -1), 1), residual, norms[2 * layer + 1], eps)
        residual.add_(left.product(left.gated_product(x, gelu_tanh), 1))


class _Left:
    """The weights that are left, in the order in which they are multiplied by."""

    def __init__(self, weights: list[Tensor], kinds: list[int]) -> None:
        self._weights, self._kinds = list(weights), list(kinds)

    def product(self, x: Tensor, parts: int, bias: Tensor | None = None) -> Tensor:
        (weight, *others), kinds = self._take(parts)
        op = torch.ops.raylm
        product: Tensor = (
            op.linear(x, weight, bias) if kinds[0] == PLAIN else op.block_linear(x, [weight, *others], kinds, bias)
        )
        return product

    def gated_product(self, x: Tensor, gelu_tanh: bool) -> Tensor:
        weights, kinds = self._take(2)
        op = torch.ops.raylm
        product: Tensor = (
            op.gated_linear(x, weights[0], None, gelu_tanh)
            if kinds[0] == PLAIN
            else op.block_gated_linear(x, weights, kinds, None, gelu_tanh)
        )
        return product

    def _take(self, parts: int) -> tuple[list[Tensor], list[int]]:
        """Those of one product, which has so many `parts` in blocks."""
        count = 1 if self._kinds[0] == PLAIN else parts
        taken = self._weights[:count], self._kinds[:count]
        del self._weights[:count], self._kinds[:count]
        return taken
