"""What the scheduler asks of speculative decoding (Leviathan et al., 2023): who proposes drafts, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from raylm.core.request import Request


class Proposal(NamedTuple):
    """Drafts for a request's next step, which verifies `num_drafts` of them.

    token_ids: what may follow request.token_ids: a guess at each of the request.num_in_flight tokens that steps on
    their way sample, then the drafts. Empty where the workers draft by themselves.
    evidence: how likely they are right, as a class of the drafter's own.
    """

    num_drafts: int
    token_ids: list[int]
    evidence: int = 0

    def first(self, num_drafts: int) -> Proposal:
        """At most so many of the drafts."""
        surplus = self.num_drafts - num_drafts
        if surplus <= 0:
            return self
        return Proposal(num_drafts, self.token_ids[: max(0, len(self.token_ids) - surplus)], self.evidence)


class DraftCounters(NamedTuple):
    """Drafts since the start, for metrics."""

    num_drafts: int = 0
    """Verifications: a row of a step that had drafts is one."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    """Accepted drafts that were the first one of their verification, the second one, ..."""


NOTHING_DRAFTED = DraftCounters()


class Drafter(Protocol):
    """Proposes drafts and learns from what became of them."""

    @property
    def counters(self) -> DraftCounters:
        """Drafts since the start."""
        ...

    def begin(self, request: Request) -> None:
        """A request runs (again)."""
        ...

    def is_on(self, num_rows: int) -> bool:
        """Whether a step of about so many rows may verify drafts. Cheap; plan() need not be asked where it may not."""
        ...

    def plan(self, requests: Sequence[Request]) -> dict[Request, Proposal]:
        """Drafts for the next step, in which these requests decode; those that verify none are left out."""
        ...

    def settle(self, request: Request, proposal: Proposal, num_accepted: int) -> None:
        """A step verified a proposal, or its first drafts."""
        ...

    def observe(self, num_rows: int, num_tokens: int, num_sampled: int, seconds: float) -> None:
        """A step in which `num_rows` requests decoded, and nothing else was computed, took so long. It computed
        `num_tokens` tokens, drafts included, and gave `num_sampled`."""
        ...

    def end(self, request: Request) -> None:
        """A request runs no more: it has ended, or was preempted."""
        ...
