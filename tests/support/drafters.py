"""A drafter for the fake worker: it knows what the worker will say, and is wrong at random."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from raylm.core.drafting import DraftCounters, Proposal
from raylm.core.request import Request
from tests.support.fakes import VOCAB, next_token


class RandomDrafter:
    """Proposes any number of drafts for any request, each right or not; checks what it is told."""

    def __init__(self, random: Random, *, most: int = 5) -> None:
        self._random = random
        self._most = most
        self._running: set[str] = set()
        self.num_verified = self.num_accepted = 0
        self.num_observed = 0

    @property
    def counters(self) -> DraftCounters:
        return DraftCounters(self.num_verified, self.num_verified, self.num_accepted)

    def begin(self, request: Request) -> None:
        assert request.id not in self._running
        self._running.add(request.id)

    def end(self, request: Request) -> None:
        self._running.remove(request.id)

    def is_on(self, num_rows: int) -> bool:
        return self._random.random() < 0.9

    def plan(self, requests: Sequence[Request]) -> dict[Request, Proposal]:
        return {request: self._proposal(request) for request in requests if self._random.random() < 0.7}

    def _proposal(self, request: Request) -> Proposal:
        assert request.id in self._running
        num_drafts = self._random.randint(1, self._most)
        likely = self._random.choice((0.0, 0.5, 0.9, 1.0))
        forced = request.forced_tokens()
        if len(forced) > request.num_in_flight and likely:
            num_drafts = min(num_drafts, len(forced) - request.num_in_flight)
            return Proposal(num_drafts, forced[: request.num_in_flight + num_drafts])
        text = list(request.token_ids)
        guesses = []
        for _ in range(request.num_in_flight + num_drafts):
            output = text[request.num_prompt :] if request.params.structure is not None else None
            right = next_token(text, output)
            text.append(right)
            guesses.append(right if self._random.random() < likely else self._random.randrange(VOCAB))
        # Fewer guesses than drafts: the worker verifies whatever stands in the cells.
        return Proposal(num_drafts, guesses[: self._random.randint(0, len(guesses))] if likely == 0.5 else guesses)

    def settle(self, request: Request, proposal: Proposal, num_accepted: int) -> None:
        assert 0 <= num_accepted <= proposal.num_drafts
        self.num_verified += proposal.num_drafts
        self.num_accepted += num_accepted

    def observe(self, num_rows: int, num_tokens: int, num_sampled: int, seconds: float) -> None:
        assert 0 < num_rows <= num_sampled <= num_tokens
        self.num_observed += 1
