"""The operator `penalize` in terms of torch's own: logits lowered for tokens that a row has already."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Penalties(NamedTuple):
    """Which rows of a token table some logits belong to and what they are to pay, in the order of penalize's arguments;
    every array is [num_rows], on the host."""

    rows: np.ndarray
    prompt_lens: np.ndarray
    seq_lens: np.ndarray
    repetition: np.ndarray
    frequency: np.ndarray
    presence: np.ndarray


def penalize(
    logits: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    prompt_lens: Tensor,
    seq_lens: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    out = logits.clone(memory_format=torch.contiguous_format)
    paying = torch.nonzero((repetition != 1) | (frequency != 0) | (presence != 0))[:, 0]
    if not paying.numel():
        return out
    repetition, frequency, presence = (x[paying, None] for x in (repetition, frequency, presence))
    is_known, generated = _occurrences(
        token_ids, rows[paying], prompt_lens[paying, None], seq_lens[paying, None], logits.shape[1]
    )
    before = logits[paying]
    values = before.float()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(generated > 0, values - (frequency * generated + presence), values)
    # A row of several infinite logits could not be sampled from.
    values = values.clamp(max=torch.finfo(logits.dtype).max).to(logits.dtype)
    out[paying] = torch.where(is_known, values, before)
    return out


def _occurrences(
    token_ids: Tensor, rows: Tensor, prompt_lens: Tensor, seq_lens: Tensor, vocab: int
) -> tuple[Tensor, Tensor]:
    """Which tokens are among the first seq_lens [n, 1] of the rows [n], and how often each is after the first
    prompt_lens [n, 1]: bool and int32, both [n, vocab]."""
    tokens = token_ids[rows, : int(seq_lens.max())]
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    is_token = (positions < seq_lens) & (tokens >= 0) & (tokens < vocab)
    is_generated = is_token & (positions >= prompt_lens)
    cells = torch.where(is_token, tokens, 0)
    zeros = torch.zeros(len(rows), vocab, dtype=torch.int32, device=tokens.device)
    known = zeros.scatter_add(1, cells, is_token.int())
    return known > 0, zeros.scatter_add_(1, cells, is_generated.int())
