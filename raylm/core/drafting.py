"""What the scheduler asks of speculative decoding (Leviathan et al., 2023): who proposes drafts, and how many."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from raylm.core.request import Request


class Proposal(NamedTuple):
    """Drafts for a request's next step, which verifies `num_drafts` of them.

    token_ids: what may follow request.token_ids: a guess at each of the request.num_in_flight tokens that steps on
    their way sample, then the drafts. Empty where the workers draft by themselves.
    """

    num_drafts: int
    token_ids: list[int]


class Drafter(Protocol):
    """Proposes drafts and learns from what became of them."""

    def begin(self, request: Request) -> None:
        """A request runs (again)."""
        ...

    def propose(self, request: Request, most: int) -> Proposal | None:
        """Up to `most` drafts for a request that decodes; None where its next step is to verify none."""
        ...

    def settle(self, request: Request, token_ids: list[int], num_drafts: int) -> None:
        """A step gave these tokens, which request.token_ids ends with now; all but the last one were drafts of the
        `num_drafts` that it verified."""
        ...

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step in which `num_rows` requests decoded and verified, `num_tokens` tokens together, took so long."""
        ...

    def end(self, request: Request) -> None:
        """A request runs no more: it has ended, or was preempted."""
        ...
