"""Logits to tokens, for a whole batch at once.

A row draws one uniform number, fixed by its seed and the position of the token, and inverts the cumulative
distribution with it: the same request gives the same tokens whatever shares its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_FIRST_CANDIDATES = 1024
"""Likeliest tokens looked at first where top-p truncates; the whole vocabulary is sorted only when they fall short."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of the logits samples; every array is [num_rows] on the host."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    position: np.ndarray


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw one token a row. logits: [num_rows, vocab] float32. Returns [num_rows] int64 on the same device."""
    greedy = batch.temperature == 0
    token_ids = logits.argmax(dim=-1)
    if greedy.all():
        return token_ids
    truncates = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
    for chosen, draw in ((~greedy & ~truncates, _draw_full), (~greedy & truncates, _draw_truncated)):
        rows = np.flatnonzero(chosen)
        if rows.size:
            index = torch.from_numpy(rows).to(logits.device)
            token_ids[index] = draw(logits[index], rows, batch)
    return token_ids


def _draw_full(logits: torch.Tensor, rows: np.ndarray, batch: SamplingBatch) -> torch.Tensor:
    """Sample from the whole distribution."""
    probs = torch.softmax(logits / _column(batch.temperature, rows, logits), dim=-1)
    return _invert(probs, rows, batch)


def _draw_truncated(logits: torch.Tensor, rows: np.ndarray, batch: SamplingBatch) -> torch.Tensor:
    """Sample from the likeliest tokens that top-k, top-p (Holtzman et al., 2020) and min-p leave."""
    probs = torch.softmax(logits / _column(batch.temperature, rows, logits), dim=-1)
    top_p = _column(batch.top_p, rows, logits)
    top_k = _column(np.where(batch.top_k > 0, batch.top_k, logits.shape[1]), rows, logits)
    values, token_ids = _candidates(probs, rows, batch, top_p)
    before = values.cumsum(dim=-1) - values
    rank = torch.arange(values.shape[1], device=values.device)
    keep = (before < top_p) & (rank < top_k) & (values >= _column(batch.min_p, rows, logits) * values[:, :1])
    choice = _invert(values * keep, rows, batch)
    return token_ids.gather(1, choice[:, None])[:, 0]


def _candidates(
    probs: torch.Tensor, rows: np.ndarray, batch: SamplingBatch, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens, most likely first: few where they are enough for every row, else the whole vocabulary."""
    vocab = probs.shape[1]
    limits = np.where(batch.top_k[rows] > 0, batch.top_k[rows], vocab)
    width = min(int(limits.max()), vocab)
    if width > _FIRST_CANDIDATES:
        values, token_ids = probs.topk(_FIRST_CANDIDATES, dim=-1)
        floor = _column(batch.min_p, rows, probs) * values[:, :1]
        enough = (values.sum(dim=-1, keepdim=True) >= top_p) | (values[:, -1:] < floor)
        short = torch.from_numpy(limits <= _FIRST_CANDIDATES).to(probs.device)
        if bool((enough[:, 0] | short).all()):
            return values, token_ids
        values, token_ids = probs.sort(dim=-1, descending=True)
        return values, token_ids
    values, token_ids = probs.topk(width, dim=-1)
    return values, token_ids


def _invert(weights: torch.Tensor, rows: np.ndarray, batch: SamplingBatch) -> torch.Tensor:
    """First index whose cumulative weight passes u times the total; float64, so that long tails keep their share."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.from_numpy(uniform_numbers(batch.seed[rows], batch.position[rows])).to(weights.device)
    target = uniform[:, None] * cumulative[:, -1:]
    choice = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # u < 1, but rounding may put the target on the total: then the last token of non-zero weight is meant.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(choice, last)


def uniform_numbers(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position): splitmix64 (Steele, Lea, Flood: OOPSLA 2014) of both."""
    state = seed.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * (position.astype(np.uint64) + np.uint64(1))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _column(values: np.ndarray, rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values[rows].astype(np.float32)).to(like.device)[:, None]
