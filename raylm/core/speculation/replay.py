"""Drafts of a chosen quality, for measuring what verification costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from raylm.core.speculation.proposer import NO_DRAFTS, Drafts

_EVIDENCE = 4
"""All drafts are of one class, of which two in three are expected to be right before any was verified."""


class ReplayProposer:
    """Drafts tokens that are known from an earlier run; each is right with a given probability, independently.

    Whether the draft of a position is right depends on the seed, the prompt and the position alone, so a position that
    is drafted twice gets the same draft.
    """

    index_budget = 0

    def __init__(self, outputs: Mapping[tuple[int, ...], Sequence[int]], probability: float, *, seed: int = 0) -> None:
        """`outputs`: what followed each prompt. A prompt that is not among them gets no drafts."""
        self._outputs = outputs
        self._probability = probability
        self._seed = seed
        self._running: dict[str, tuple[list[int], int, list[int]]] = {}

    def begin(self, key: str, token_ids: list[int], space: str) -> None:
        output = self._outputs.get(tuple(token_ids))
        if output is not None:
            self._running[key] = (token_ids, len(token_ids), self._spoilt(output, token_ids))

    def prepare(self, key: str, limit: int) -> int:
        return 0

    def propose(self, key: str, count: int) -> Drafts:
        if key not in self._running:
            return NO_DRAFTS
        token_ids, num_prompt, drafts = self._running[key]
        done = len(token_ids) - num_prompt
        return Drafts(drafts[done : done + count], _EVIDENCE)

    def end(self, key: str) -> None:
        self._running.pop(key, None)

    def _spoilt(self, output: Sequence[int], prompt: list[int]) -> list[int]:
        random = Random(f"{self._seed} {prompt}")
        return [token if random.random() < self._probability else abs(token - 1) for token in output]
