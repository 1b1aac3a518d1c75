"""Speculation where the workers draft by a model of their own: the scheduler says how many tokens, not which."""

from __future__ import annotations

from collections.abc import Sequence

from raylm.core.drafting import DraftCounters, Proposal
from raylm.core.request import Request
from raylm.core.speculation.acceptance import Acceptance, OwnShares
from raylm.core.speculation.lengths import DraftLengths

_EVIDENCE = 5
"""Drafts of a model are all of one class; before any was verified it is expected of them what is expected of this
class of an n-gram's."""


class DeviceDrafter:
    """The Drafter whose drafts are made on the device, when the step begins that verifies them."""

    def __init__(self, num_drafts: int) -> None:
        """`num_drafts`: the most drafts that a row verifies in a step."""
        self._num_drafts = num_drafts
        self._lengths = DraftLengths()
        self._acceptance = Acceptance(num_drafts)
        self._shares: dict[Request, OwnShares] = {}
        self._num_verified = self._num_drafted = self._num_accepted = 0
        self._by_position = [0] * num_drafts

    @property
    def counters(self) -> DraftCounters:
        """Drafts since the start."""
        return DraftCounters(self._num_verified, self._num_drafted, self._num_accepted, tuple(self._by_position))

    def begin(self, request: Request) -> None:
        """A request runs (again)."""
        self._shares[request] = OwnShares()

    def end(self, request: Request) -> None:
        """A request runs no more: it has ended, or was preempted."""
        self._shares.pop(request, None)

    def is_on(self, num_rows: int) -> bool:
        """Whether a step of about so many rows may verify drafts."""
        return self._lengths.is_on(num_rows)

    def plan(self, requests: Sequence[Request]) -> dict[Request, Proposal]:
        """Drafts for the next step, in which these requests decode; those that verify none are left out."""
        if not self._lengths.is_on(len(requests)):
            return {}
        values = [self._values(request) for request in requests]
        lengths = self._lengths.choose(values)
        return {
            request: Proposal(length, [], _EVIDENCE)
            for request, length in zip(requests, lengths, strict=True)
            if length
        }

    def settle(self, request: Request, proposal: Proposal, num_accepted: int) -> None:
        """A step verified a proposal, or its first drafts."""
        self._num_verified += 1
        self._num_drafted += proposal.num_drafts
        self._num_accepted += num_accepted
        for position in range(num_accepted):
            self._by_position[position] += 1
        shares = self._shares.get(request)
        if shares is not None:
            self._acceptance.observe(shares, _EVIDENCE, proposal.num_drafts, num_accepted)

    def observe(self, num_rows: int, num_tokens: int, num_sampled: int, seconds: float) -> None:
        """A step of decoding rows alone took so long; it computed `num_tokens` tokens and gave `num_sampled`."""
        self._lengths.observe(num_rows, num_tokens, num_sampled, seconds)

    def _values(self, request: Request) -> list[float]:
        shares = self._shares.get(request)
        most = min(self._num_drafts, request.max_len - request.num_known - 1)
        return [] if shares is None or most <= 0 else self._acceptance.values(shares, _EVIDENCE, most)
