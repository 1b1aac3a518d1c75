"""The sampler against distributions worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raylm import ops
from raylm.ops.sampling import Sampling, uniform_numbers


def sample(logits: torch.Tensor, settings: Sampling) -> torch.Tensor:
    return ops.sample(logits, *(torch.from_numpy(array) for array in settings))


def batch(rows: int, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, position=None) -> Sampling:
    return Sampling(
        temperature=np.broadcast_to(np.array(temperature, dtype=np.float32), rows).copy(),
        top_p=np.broadcast_to(np.array(top_p, dtype=np.float32), rows).copy(),
        top_k=np.broadcast_to(np.array(top_k, dtype=np.int64), rows).copy(),
        min_p=np.broadcast_to(np.array(min_p, dtype=np.float32), rows).copy(),
        seed=np.arange(rows, dtype=np.int64) if seed is None else np.full(rows, seed, dtype=np.int64),
        position=np.full(rows, 5, dtype=np.int64) if position is None else position,
    )


def frequencies(probs: list[float], rows: int = 20_000, **options) -> torch.Tensor:
    """How often each token is drawn over many seeds."""
    logits = torch.tensor(probs, dtype=torch.float32).log().expand(rows, -1)
    tokens = sample(logits, batch(rows, **options))
    return torch.bincount(tokens, minlength=len(probs)).float() / rows


def test_greedy_takes_the_likeliest():
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, batch(7, temperature=0.0)), logits.argmax(-1))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_p": 0.75}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_p": 1e-6}, [1, 0, 0, 0]),
        ({"min_p": 0.4}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.4}, [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_they_should(options, expected):
    assert torch.allclose(
        frequencies([0.5, 0.25, 0.15, 0.1], **options), torch.tensor(expected, dtype=torch.float32), atol=0.015
    )


def test_a_token_cut_off_is_never_drawn():
    drawn = frequencies([0.4, 0.3, 0.2, 0.1], top_k=2)
    assert drawn[2:].sum() == 0


def test_top_p_over_a_flat_vocabulary_looks_past_the_first_candidates():
    vocab = 5000
    tokens = sample(torch.zeros(4000, vocab), batch(4000, top_p=0.9))
    assert tokens.unique().numel() > 2000


def test_mixed_rows_sample_each_in_its_own_way():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().expand(3000, -1).clone()
    kinds = np.arange(3000) % 3
    mixed = batch(3000, temperature=np.where(kinds == 0, 0.0, 1.0), top_k=np.where(kinds == 1, 2, 0))
    tokens = sample(logits, mixed).numpy()
    assert set(tokens[kinds == 0]) == {0}
    assert set(tokens[kinds == 1]) == {0, 1}
    assert set(tokens[kinds == 2]) == {0, 1, 2, 3}


def test_a_row_draws_the_same_whatever_shares_its_batch():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    together = sample(logits, batch(6, temperature=0.8, top_p=0.9))
    for row in range(6):
        alone = batch(1, temperature=0.8, top_p=0.9, seed=row)
        assert sample(logits[row : row + 1], alone)[0] == together[row]


def test_positions_of_one_seed_draw_independent_numbers():
    numbers = uniform_numbers(np.zeros(100_000, dtype=np.int64), np.arange(100_000))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
    assert np.unique(numbers).size == numbers.size


def test_negative_seeds_work():
    assert 0 <= uniform_numbers(np.array([-1]), np.array([0]))[0] < 1
