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
    prompt_lens, seq_lens = prompt_lens[paying, None], seq_lens[paying, None]
    tokens = token_ids[rows[paying], : int(seq_lens.max())].long()  # [paying, longest]
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    is_token = (positions < seq_lens) & (tokens >= 0) & (tokens < logits.shape[1])
    # What is no token looks at token 0: where its count is 0, its logit stays.
    cells = torch.where(is_token, tokens, 0)
    known = _count(cells, is_token, logits.shape[1])
    generated = _count(cells, is_token & (positions >= prompt_lens), logits.shape[1])
    mine = logits[paying]
    before = mine.gather(1, cells)
    values = before.float()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(generated > 0, values - (frequency * generated + presence), values)
    # A row of several infinite logits could not be sampled from.
    values = values.clamp(max=torch.finfo(logits.dtype).max).to(logits.dtype)
    # Cells of one token all hold the same, so it does not matter which is written last.
    out[paying] = mine.scatter_(1, cells, torch.where(known > 0, values, before))
    return out


def _count(cells: Tensor, chosen: Tensor, vocab: int) -> Tensor:
    """For each of the tokens `cells`, how many chosen ones of its row are the same: int32; all [rows, length]."""
    counts = torch.zeros(len(cells), vocab, dtype=torch.int32, device=cells.device)
    return counts.scatter_add_(1, cells, chosen.int()).gather(1, cells)
