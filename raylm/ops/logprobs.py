"""The operators `token_logprobs` and `gather_logprobs` in terms of torch's own."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 256
"""Rows of logits that are in memory in float32 at a time."""


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chunks = [
        _token_logprobs(rows.float(), tokens, num_top)
        for rows, tokens in zip(logits.split(_CHUNK), token_ids.split(_CHUNK), strict=True)
    ]
    values, ranks, top_ids, top_values = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return values, ranks, top_ids, top_values


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    chunks = zip(logits.split(_CHUNK), token_ids.split(_CHUNK), strict=True)
    return torch.cat([_normalize(_gather(x := rows.float(), tokens), x) for rows, tokens in chunks])


def _token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = _gather(logits, token_ids[:, None])
    ranks = (logits > own).sum(-1) + 1
    top_ids = _top(logits, num_top)
    values = _normalize(torch.cat([own, logits.gather(1, top_ids)], 1), logits)
    return values[:, 0], ranks, top_ids, values[:, 1:]


def _gather(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The logits of tokens [M, N] of float32 [M, V]; of what is no token of the vocabulary, minus infinity."""
    vocab = logits.shape[1]
    values = logits.gather(1, token_ids.clamp(0, vocab - 1))
    return values.masked_fill_((token_ids < 0) | (token_ids >= vocab), float("-inf"))


def _normalize(values: Tensor, logits: Tensor) -> Tensor:
    """Logits that were taken from rows of `logits` to log probabilities. Where a row has no finite one they are all
    minus infinity."""
    most = logits.amax(-1, keepdim=True)
    total = (logits - most).exp_().sum(-1, keepdim=True).log_()
    # Not most + total: next to a large logit the logarithm would be lost.
    return torch.where(values == float("-inf"), values, values - most - total)


def _top(logits: Tensor, count: int) -> Tensor:
    """The likeliest tokens of float32 [M, V], likeliest first and of equals the first: int64 [M, count].

    torch.topk orders equals as it likes, so it is given integers that no two tokens share.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals.
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long() << 32
    keys -= torch.arange(logits.shape[1], device=logits.device)
    return keys.topk(count).indices
