"""Speculation on the scheduler's requests."""

from __future__ import annotations

from collections.abc import Sequence

from raylm.config.speculation import SpeculationConfig
from raylm.core.drafting import DraftCounters, Drafter, Proposal
from raylm.core.options import RequestOptions
from raylm.core.request import Request
from raylm.core.speculation.ngram import NgramProposer
from raylm.core.speculation.proposer import Proposer
from raylm.core.speculation.silent import OnDevice, Silent
from raylm.core.speculation.speculation import Decoding, Speculation
from raylm.core.speculation.suffix import SuffixProposer


class RequestDrafter:
    """The Drafter of requests: what their grammars force, else what a proposer says."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation

    @property
    def counters(self) -> DraftCounters:
        """Drafts since the start."""
        return self._speculation.counters

    def begin(self, request: Request) -> None:
        """A request runs (again)."""
        self._speculation.added(request.id, request.token_ids, _space(request.options))

    def end(self, request: Request) -> None:
        """A request runs no more: it has ended, or was preempted."""
        self._speculation.ended(request.id)

    def is_on(self, num_rows: int) -> bool:
        """Whether a step of about so many rows may verify drafts."""
        return self._speculation.is_on(num_rows)

    def plan(self, requests: Sequence[Request]) -> dict[Request, Proposal]:
        """Drafts for the next step, in which these requests decode; those that verify none are left out."""
        if not self._speculation.is_on(len(requests)):
            return {}
        rows = [
            Decoding(
                request.id, request.num_in_flight, request.max_len - request.num_known - 1, request.forced_tokens()
            )
            for request in requests
        ]
        planned = self._speculation.plan(rows)
        return {request: planned[request.id] for request in requests if request.id in planned}

    def settle(self, request: Request, proposal: Proposal, num_accepted: int) -> None:
        """A step verified a proposal, or its first drafts."""
        self._speculation.settled(request.id, proposal, num_accepted)

    def observe(self, num_rows: int, num_tokens: int, num_sampled: int, seconds: float) -> None:
        """A step of decoding rows alone took so long; it computed `num_tokens` tokens and gave `num_sampled`."""
        self._speculation.observe(num_rows, num_tokens, num_sampled, seconds)


def _space(options: RequestOptions) -> str:
    """Requests of one tenant and one cache_salt may be drafted from each other's outputs."""
    return f"{len(options.tenant)} {options.tenant} {options.cache_salt}"


def make_drafter(config: SpeculationConfig) -> Drafter | None:
    """What the configuration asks for; None where it asks for nothing."""
    proposer: Proposer
    if config.method == "none":
        return None
    if config.method == "ngram":
        proposer = NgramProposer(config.min_n, config.max_n)
    elif config.method == "suffix":
        proposer = SuffixProposer(min_match=config.min_n)
    else:
        proposer = OnDevice() if config.on_device else Silent()
    return RequestDrafter(Speculation(proposer, config.num_drafts))
