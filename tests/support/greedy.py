"""Greedy tokens against transformers' own."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel


def random_prompts(count: int, vocab: int) -> list[list[int]]:
    """Prompts of 3 to 39 tokens, the same ones each time."""
    rng = random.Random(0)
    return [[rng.randrange(3, vocab) for _ in range(rng.randrange(3, 40))] for _ in range(count)]


@torch.inference_mode()
def assert_greedy(
    model: PreTrainedModel,
    prompt: list[int],
    tokens: list[int],
    change: Callable[[list[int], Tensor], Tensor] = lambda generated, logits: logits,
) -> None:
    """The tokens are transformers' own greedy ones; where rounding makes the first differ, it is among its top 5.

    `change` makes of the tokens generated so far and the next one's logits [V] those that are meant.
    """
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logits = torch.stack([change(tokens[:position], one) for position, one in enumerate(logits)])
    for position, token in enumerate(tokens):
        if logits[position].argmax() != token:
            assert token in logits[position].topk(5).indices, f"token {position} is {token}"
            return
