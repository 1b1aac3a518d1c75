"""The distribution that a token is drawn from, for `generation.logprobs: processed`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def processed(logits: Tensor, temperature: Tensor, truncation: Sequence[Tensor] | None) -> Tensor:
    """Logits [M, vocab] in float32 whose softmax is what ops.sample draws from: divided by the temperature, and minus
    infinity for what `truncation` (top_k, top_p, min_p; each [M]) drops. A greedy row keeps its logits."""
    values = logits.float()
    is_greedy = (temperature == 0)[:, None]
    # Where every token is masked nothing is subtracted: all stay minus infinity.
    values = values - values.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    values = values / torch.where(is_greedy, 1.0, temperature[:, None])
    if truncation is None:
        return values
    top_k, top_p, min_p = (limit[:, None] for limit in truncation)
    # Sorted before the softmax, in which small ones become equal.
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    rank = torch.arange(probs.shape[1], device=probs.device)
    # Off is off, also where the first tokens have all but a rounding error.
    keeps = ((before < top_p) | (top_p == 1)) & ((rank < top_k) | (top_k == 0)) & (probs >= min_p * probs[:, :1])
    keeps = torch.zeros_like(keeps).scatter_(1, order, keeps | is_greedy)
    return values.masked_fill_(~keeps, -torch.inf)


def truncates(top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> bool:
    """Whether any row drops tokens."""
    return bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())
