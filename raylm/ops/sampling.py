"""The operator `sample` in terms of torch's own: logits to tokens, for a whole batch at once.

A row draws one uniform number, fixed by its seed and the position of the token, and inverts the cumulative
distribution with it: the same request gives the same tokens whatever shares its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_FIRST_CANDIDATES = 1024
"""Likeliest tokens looked at first where top-p truncates; the whole vocabulary is sorted only when they fall short."""


class Sampling(NamedTuple):
    """How some rows sample their next token, in the order of sample's arguments; every array is [num_rows], on the
    host."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    position: np.ndarray

    def of(self, rows: np.ndarray) -> Sampling:
        """The settings of some of the rows."""
        return Sampling(*(values[rows] for values in self))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    every = Sampling(*(x.cpu().numpy() for x in (temperature, top_k, top_p, min_p, seed, position)))
    greedy = every.temperature == 0
    token_ids = _likeliest(logits)
    if greedy.all():
        return token_ids
    truncates = (every.top_k > 0) | (every.top_p < 1) | (every.min_p > 0)
    for chosen, draw in ((~greedy & ~truncates, _draw_full), (~greedy & truncates, _draw_truncated)):
        rows = np.flatnonzero(chosen)
        if rows.size:
            index = torch.from_numpy(rows).to(logits.device)
            settings = every.of(rows)
            values = logits[index].float()
            # The largest is 0 before the division: what is large, over a small temperature, would be infinite.
            scaled = (values - values.amax(dim=-1, keepdim=True)) / _column(settings.temperature, logits)
            # Where every token is masked there is nothing to draw from: the first one is as good as any, and a token.
            token_ids[index] = draw(torch.softmax(scaled, dim=-1).nan_to_num(0.0), settings)
    return token_ids


def _likeliest(logits: Tensor) -> Tensor:
    """The first of the largest of each row."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # Of 16 rows of 49,152 in 0.09 ms; torch's takes 2.0, a number at a time.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draw_full(probs: Tensor, settings: Sampling) -> Tensor:
    """Sample from the whole distribution."""
    return _invert(probs, settings)


def _draw_truncated(probs: Tensor, settings: Sampling) -> Tensor:
    """Sample from the likeliest tokens that top-k, top-p (Holtzman et al., 2020) and min-p leave."""
    top_p = _column(settings.top_p, probs)
    top_k = _column(np.where(settings.top_k > 0, settings.top_k, probs.shape[1]), probs)
    values, token_ids = _candidates(probs, settings, top_p)
    before = values.cumsum(dim=-1) - values
    rank = torch.arange(values.shape[1], device=values.device)
    keep = (before < top_p) & (rank < top_k) & (values >= _column(settings.min_p, probs) * values[:, :1])
    # In the order of the vocabulary, as _draw_full goes and as the compiled kernel does, which sorts nothing.
    token_ids, order = token_ids.sort(dim=-1)
    choice = _invert((values * keep).gather(1, order), settings)
    return token_ids.gather(1, choice[:, None])[:, 0]


def _candidates(probs: Tensor, settings: Sampling, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, most likely first: few where they are enough for every row, else the whole vocabulary."""
    vocab = probs.shape[1]
    limits = np.where(settings.top_k > 0, settings.top_k, vocab)
    width = min(int(limits.max()), vocab)
    if width > _FIRST_CANDIDATES:
        values, token_ids = probs.topk(_FIRST_CANDIDATES, dim=-1)
        floor = _column(settings.min_p, probs) * values[:, :1]
        enough = (values.sum(dim=-1, keepdim=True) >= top_p) | (values[:, -1:] < floor)
        short = torch.from_numpy(limits <= _FIRST_CANDIDATES).to(probs.device)
        if bool((enough[:, 0] | short).all()):
            return values, token_ids
        values, token_ids = probs.sort(dim=-1, descending=True)
        return values, token_ids
    values, token_ids = probs.topk(width, dim=-1)
    return values, token_ids


def _invert(weights: Tensor, settings: Sampling) -> Tensor:
    """First index whose cumulative weight passes u times the total; float64, so that long tails keep their share."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.from_numpy(uniform_numbers(settings.seed, settings.position)).to(weights.device)
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


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(like.device)[:, None]
