"""All layers of a decode step of few rows in terms of the other operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.ops.patches import patched_linear


def few_layers(
    residual: Tensor,
    products: list[Tensor],
    scales: list[Tensor],
    norms: list[Tensor],
    head_norms: list[Tensor],
    biases: list[Tensor],
    numbers: int,
    group: int,
    per_token: int,
    sigmoid: bool,
    normalized: bool,
    route_scale: float,
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
    cells: Tensor,
    counters: Tensor,
    windows: Tensor | None,
    rank: int,
    capacity: int,
    limit_s: float,
) -> None:
    if windows is not None:
        raise ValueError("few_layers: windows are given, but only a compiled kernel sums over ranks")
    op = torch.ops.raylm
    rows, head_dim = len(residual), cos_sin.shape[1]
    query_start = torch.arange(rows + 1, dtype=torch.int32, device=residual.device)
    longest = block_table.shape[1] * k_caches[0].shape[1]
    each, of_scales = len(products) // len(k_caches), len(scales) // len(k_caches)
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        of_layer = products[each * layer : each * (layer + 1)]
        scales_of_layer = [*scales[of_scales * layer : of_scales * (layer + 1)], *[None] * (each - of_scales)]
        qkv, o, *mlp = (_Product(*one, numbers, group) for one in zip(of_layer, scales_of_layer, strict=True))
        heads = qkv(op.rms_norm(residual, norms[2 * layer], eps), biases[layer] if biases else None)
        heads = heads.view(rows, -1, head_dim)
        num_kv_heads = k_cache.shape[2]
        q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        q_norm, k_norm = head_norms[2 * layer : 2 * layer + 2] if head_norms else (None, None)
        op.rope_store(q, k, v, q_norm, k_norm, eps, positions, cos_sin, k_cache, v_cache, slot_mapping)
        attended = op.paged_attention(
            q, k_cache, v_cache, block_table, query_start, seq_lens, 1, longest, scale, 0, 0.0, None
        )
        residual.add_(o(attended.view(rows, -1)))
        normed = op.rms_norm(residual, norms[2 * layer + 1], eps)
        if per_token == 0:
            gate_up, down = mlp
            residual.add_(down((op.gelu_tanh_mul if gelu_tanh else op.silu_mul)(gate_up(normed))))
            continue
        router, gate_up, down = mlp
        weights, chosen = op.route(router(normed), None, per_token, sigmoid, normalized, route_scale, 1, 1)
        mixture = normed, gate_up.weight, down.weight, weights, chosen, None, None, int(gelu_tanh), 0.0
        residual.add_(op.experts(*mixture) if numbers < 0 else op.patched_experts(*mixture, numbers, group))


class _Product(NamedTuple):
    weight: Tensor
    scales: Tensor | None
    numbers: int
    group: int

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.weight.dtype == torch.uint8:
            return patched_linear(x, self.weight, bias, self.numbers, self.group)
        if self.scales is None:
            return F.linear(x, self.weight, bias)
        return F.linear(x, (self.weight.float() * self.scales.unsqueeze(-1)).to(x.dtype), bias)


def few_layers_rows(
    x: Tensor,
    width: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_layers: int,
    scaled: bool,
    numbers: int,
    group: int,
    experts: int,
    per_token: int,
) -> int:
    return 0
