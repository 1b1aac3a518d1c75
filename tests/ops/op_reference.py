"""The operators written as plainly as possible, in float64: what the kernels are held to."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from raylm import ops

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = tuple(TOLERANCES)


def close(actual: Tensor, expected: Tensor, *, scale: float = 1.0) -> None:
    """Compare with a float64 reference, as closely as the dtype of `actual` allows."""
    tolerance = TOLERANCES[actual.dtype] * scale
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.double()
    return h / torch.sqrt((h * h).mean(-1, keepdim=True) + eps) * weight.double()


def rotary(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """The rotated copy of x [T, H, D]."""
    out = x.double().clone()
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].double()[:, None].split(half, dim=-1)
    first, second = x[..., :half].double(), x[..., half : 2 * half].double()
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    return out


def gated(x: Tensor, activation: str, limit: float = 0.0) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    query_lens: list[int],
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D], sequence after sequence, over each sequence's own keys [L, Hk, D]."""
    rows = []
    for queries, k, v in zip(q.double().split(query_lens), keys, values, strict=True):
        group = q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        positions = torch.arange(len(k), device=q.device)
        distances = positions - positions[len(k) - len(queries) :, None]
        scores = torch.einsum("qhd,lhd->hql", queries, k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.double()[:, None, None] * distances
        unseen = distances > 0
        if window:
            unseen = unseen | (distances <= -window)
        scores = scores.masked_fill(unseen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(queries), 1)], dim=-1)
        shares = scores.softmax(-1)[..., : len(k)]
        rows.append(torch.einsum("hql,lhd->qhd", shares, v))
    return torch.cat(rows)


class LayersStep(Protocol):
    """One token each of S sequences, with the caches of all layers."""

    residual: Tensor
    k_caches: list[Tensor]
    v_caches: list[Tensor]
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    block_table: Tensor
    cos_sin: Tensor


def decoder_layers(step: LayersStep, products: list[Tensor], layers: ops.LayerWeights | ops.StoredLayers) -> Tensor:
    """The residual stream behind all layers, in float64; keys and values go into the caches. `products`: of each layer
    q, k and v, o, of a mixture the router, gate and up, down, as numbers."""
    x, head_dim = step.residual.double(), step.k_caches[0].shape[3]
    each = len(products) // len(step.k_caches)
    for layer, (k_cache, v_cache) in enumerate(zip(step.k_caches, step.v_caches, strict=True)):
        qkv, o, *mlp = (weight.double() for weight in products[each * layer : each * (layer + 1)])
        heads = rms_norm(x, layers.norms[2 * layer], layers.eps) @ qkv.T
        if layers.biases:
            heads = heads + layers.biases[layer].double()
        num_kv_heads = k_cache.shape[2]
        heads = heads.view(len(x), -1, head_dim)
        q, k, v = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        if layers.head_norms:
            q = rms_norm(q, layers.head_norms[2 * layer], layers.eps)
            k = rms_norm(k, layers.head_norms[2 * layer + 1], layers.eps)
        q, k = (rotary(part, step.positions, step.cos_sin) for part in (q, k))
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache.flatten(0, 1)[step.slot_mapping] = new.to(cache.dtype)
        cached = [
            [cache[row].flatten(0, 1)[:length] for row, length in zip(step.block_table, step.seq_lens, strict=True)]
            for cache in (k_cache, v_cache)
        ]
        attended = attention(q, *cached, [1] * len(x), scale=layers.scale)
        x = x + attended.flatten(1) @ o.T
        normed = rms_norm(x, layers.norms[2 * layer + 1], layers.eps)
        activation = "gelu_tanh" if layers.gelu_tanh else "silu"
        if isinstance(layers, ops.LayerWeights) and layers.mixture is not None:
            x = x + mixture(normed, *mlp, layers.mixture, activation)
        else:
            gate_up, down = mlp
            x = x + gated(normed @ gate_up.T, activation) @ down.T
    return x


def mixture(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, how: ops.Mixture, activation: str) -> Tensor:
    """Each row's sum over its experts. Which these are must not hang on rounding: else an assertion fails."""
    logits = x @ router.T
    scores = logits.sigmoid() if how.sigmoid else logits.softmax(dim=-1)
    weights, chosen = scores.topk(how.per_token, dim=-1)
    ordered = logits.sort(dim=-1, descending=True).values
    gaps = ordered[:, how.per_token - 1] - ordered[:, how.per_token]
    assert bool((gaps > 0.03 * logits.std()).all()), "the reference's own choice of experts is too close"
    if how.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row] * how.scale, strict=True):
            out[row] += weight * (gated(x[row : row + 1] @ gate_up[expert].T, activation) @ down[expert].T)[0]
    return out


def penalized(
    logits: Tensor, tokens: list[int], num_prompt: int, repetition: float, frequency: float, presence: float
) -> Tensor:
    """One row of logits [V] after the penalties for these tokens, the first num_prompt of which are the prompt."""
    out = logits.double().cpu().clone()
    for token in {token for token in tokens if 0 <= token < len(out)}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        if count := tokens[num_prompt:].count(token):
            out[token] -= frequency * count + presence
    return out.clamp(max=torch.finfo(logits.dtype).max)


def kept_tokens(probs: Tensor, top_k: int, top_p: float, min_p: float, *, slack: float = 0.0) -> Tensor:
    """Which tokens of one distribution [V] top-k, top-p and min-p all keep, the first of equals; with slack, all that
    are within that part of a limit."""
    values, order = probs.sort(descending=True, stable=True)
    keep = values >= min_p * (1 - slack) * values[0]
    if top_p < 1:
        keep &= values.cumsum(0) - values < top_p * (1 + slack)
    if top_k:
        keep &= torch.arange(len(values)) < top_k
    if slack:
        keep = values >= values[keep].min() * (1 - slack)
    return torch.zeros_like(keep).scatter(0, order, keep)
