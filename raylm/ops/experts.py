"""A mixture of experts in terms of torch's operators: which experts a token goes to, and what they make of it.

Nothing here waits for the device: how many tokens an expert has is known there alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
"""Of gated experts: the operator takes the place in this list."""
SWIGLU_ALPHA = 1.702
"""clamped_swiglu: what the gate is multiplied by within the sigmoid."""
_GATHERED_BYTES = 1 << 26
"""Weights that are copied at a time where there is no grouped product."""


def route(
    logits: Tensor,
    bias: Tensor | None,
    per_token: int,
    sigmoid: bool,
    normalized: bool,
    scale: float,
    groups: int,
    groups_per_token: int,
) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    preferred = scores if bias is None else scores + bias
    if groups > 1:
        by_group = preferred.unflatten(-1, (groups, -1))
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(groups_per_token, dim=-1, sorted=False).indices
        is_left = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        preferred = by_group.masked_fill(~is_left.unsqueeze(-1), float("-inf")).flatten(-2)
    chosen = preferred.topk(per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, chosen


def sparse_mixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    left, weights, chosen = logits.float(), [], []
    for _ in range(2):
        best = left.max(-1, keepdim=True)
        distance = (best.values - left) / logits.float().abs().clamp(min=best.values)
        near = left.masked_fill(distance > 2 * jitter, float("-inf")).softmax(-1)
        weights.append(near.gather(-1, best.indices))
        chosen.append(best.indices)
        left = left.scatter(-1, best.indices, float("-inf"))
    return torch.cat(weights, -1), torch.cat(chosen, -1)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: int,
    limit: float,
    between: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`between` converts the activation's float32 output to down's dtype; by default it is a cast."""
    num_tokens, per_token = chosen.shape
    wanted, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(wanted, torch.arange(len(gate_up), device=x.device), right=True).int()
    both = _grouped(x[order // per_token], gate_up, wanted, ends).float()
    if gate_up_bias is not None:
        both += gate_up_bias[wanted]
    inner = _gated(*both.chunk(2, dim=-1), ACTIVATIONS[activation], limit)
    inner = inner.to(x.dtype) if between is None else between(inner)
    parts = _grouped(inner, down, wanted, ends).float()
    if down_bias is not None:
        parts += down_bias[wanted]
    parts *= weights.flatten()[order].unsqueeze(-1)
    return (
        torch.empty_like(parts)
        .index_copy_(0, order, parts)
        .view(num_tokens, per_token, down.shape[1])
        .sum(1)
        .to(x.dtype)
    )


def experts_kernels(x: Tensor, down: Tensor) -> bool:
    return False


def _gated(gate: Tensor, up: Tensor, activation: str, limit: float) -> Tensor:
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=limit)
    return gate * F.sigmoid(SWIGLU_ALPHA * gate) * (up.clamp(-limit, limit) + 1)


def _grouped(rows: Tensor, weight: Tensor, wanted: Tensor, ends: Tensor) -> Tensor:
    """Each row [K] times its own of weight [E, N, K]: rows are in the order of their experts, `wanted`, and those of
    expert e end before ends[e]."""
    if not rows.is_cuda or _has_grouped_products(rows):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    step = max(1, _GATHERED_BYTES // weight[0].nbytes)
    pieces = zip(rows.split(step), wanted.split(step), strict=True)
    return torch.cat([torch.bmm(weight[mine], piece.unsqueeze(-1)).squeeze(-1) for piece, mine in pieces])


def _has_grouped_products(rows: Tensor) -> bool:
    """Elsewhere torch reads on the host where experts end."""
    return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device)[0] >= 9
