"""Speculative decoding as the scheduler sees it."""

from __future__ import annotations

from typing import NamedTuple

from raylm.core.drafting import DraftCounters, Proposal
from raylm.core.speculation.acceptance import Acceptance, OwnShares
from raylm.core.speculation.lengths import DraftLengths
from raylm.core.speculation.proposer import FORCED, Drafts, Proposer

_MANY_ROWS = 64
_SAMPLED = 5
"""From so many rows on, what became of every fifth row's drafts is learned from: noting all would cost a millisecond a
step. Five has no divisor in common with the usual numbers of rows."""


class Decoding(NamedTuple):
    """A row that decodes in the next step: at most `num_in_flight` tokens of it are computed by plans on their way and
    not known here, and at most `limit` drafts may follow them. `forced`: what follows its known tokens by its
    grammar."""

    key: str
    num_in_flight: int
    limit: int
    forced: list[int] = []


class _Untested(NamedTuple):
    """Drafts that no step verifies. Once the tokens of their positions are known, those tell as much."""

    position: int
    """Of the first draft."""
    drafts: Drafts


class _Row:
    """A running request: its tokens, its shares of accepted drafts, and what it was proposed."""

    __slots__ = ("shares", "token_ids", "untested")

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.shares = OwnShares()
        self.untested: _Untested | None = None


class Speculation:
    """Drafts for the plans of a scheduler.

    plan() decides what each row of the next step verifies, settled() says what became of it, and observe() what the
    step cost. Only plain decoding is compared with: neither rows that compute prompts nor steps that have such rows are
    said to plan() and observe().
    """

    def __init__(self, proposer: Proposer, num_drafts: int) -> None:
        """`num_drafts`: the most drafts that a row verifies in a step."""
        self._proposer = proposer
        self._num_drafts = num_drafts
        self._lengths = DraftLengths()
        self._acceptance = Acceptance(num_drafts)
        self._rows: dict[str, _Row] = {}
        self._num_verified = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._by_position = [0] * num_drafts

    @property
    def counters(self) -> DraftCounters:
        return DraftCounters(self._num_verified, self._num_drafted, self._num_accepted, tuple(self._by_position))

    def added(self, key: str, token_ids: list[int], space: str = "") -> None:
        """A request begins to run. `token_ids` is its own list: known tokens are appended to it and it is never cut.
        Text of other requests helps only where their `space` is equal."""
        self._rows[key] = _Row(token_ids)
        self._proposer.begin(key, token_ids, space)

    def ended(self, key: str) -> None:
        """A request has ended, or goes on without drafts. An unknown one is ignored."""
        if self._rows.pop(key, None) is not None:
            self._proposer.end(key)

    def is_on(self, num_rows: int) -> bool:
        """Whether plan() may give drafts to a step of so many rows. While it may not, drafts cost nothing at all."""
        return self._lengths.is_on(num_rows)

    def plan(self, rows: list[Decoding]) -> dict[str, Proposal]:
        """What rows of the next step are to verify; those that verify nothing are left out. `rows`: all that decode.

        The tokens of a proposal begin with guesses of those in flight; a wrong guess costs only the verification.
        """
        self._prepare()
        proposed = [self._propose(*row) for row in rows]
        values = [
            self._acceptance.values(self._rows[key].shares, drafts.evidence, len(drafts.token_ids) - num_in_flight)
            if drafts is not None
            else []
            for (key, num_in_flight, *_), drafts in zip(rows, proposed, strict=True)
        ]
        planned = {}
        for (key, num_in_flight, *_), drafts, length in zip(rows, proposed, self._lengths.choose(values), strict=True):
            if drafts is None:
                continue
            row = self._rows[key]
            if length:
                token_ids = drafts.token_ids[: num_in_flight + length] if drafts.known else []
                planned[key] = Proposal(length, token_ids, drafts.evidence)
                row.untested = None
            elif row.untested is None and drafts.known:
                row.untested = _Untested(
                    len(row.token_ids) + num_in_flight, drafts._replace(token_ids=drafts.token_ids[num_in_flight:])
                )
        return planned

    def settled(self, key: str, proposal: Proposal, num_accepted: int) -> None:
        """A step verified a proposal, or its first drafts. An unknown request is ignored."""
        row = self._rows.get(key)
        if row is None:
            return
        num_drafted, evidence = proposal.num_drafts, proposal.evidence
        self._num_verified += 1
        if len(self._rows) < _MANY_ROWS or self._num_verified % _SAMPLED == 0:
            self._acceptance.observe(row.shares, evidence, num_drafted, num_accepted)
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        for position in range(num_accepted):
            self._by_position[position] += 1

    def observe(self, num_rows: int, num_tokens: int, num_sampled: int, seconds: float) -> None:
        """A step of decoding rows alone took so long; it computed `num_tokens` tokens and gave `num_sampled`."""
        self._lengths.observe(num_rows, num_tokens, num_sampled, seconds)

    def _prepare(self) -> None:
        """Index what the running requests have not had indexed, up to the step's budget, the oldest request first."""
        left = self._proposer.index_budget
        prepare = self._proposer.prepare
        for key in self._rows:
            if left <= 0:
                return
            left -= prepare(key, left)

    def _propose(self, key: str, num_in_flight: int, limit: int, forced: list[int]) -> Drafts | None:
        row = self._rows.get(key)
        if row is None or limit <= 0:
            return None
        if row.untested is not None:
            self._compare(row, row.untested)
        count = num_in_flight + min(limit, self._num_drafts)
        if len(forced) > num_in_flight:
            return Drafts(forced[:count], FORCED)
        drafts = self._proposer.propose(key, count)
        return drafts if len(drafts.token_ids) > num_in_flight else None

    def _compare(self, row: _Row, untested: _Untested) -> None:
        """Learn from drafts that were not verified, once it is known how many of them are right."""
        drafts = untested.drafts.token_ids
        known = row.token_ids[untested.position : untested.position + len(drafts)]
        num_right = 0
        while num_right < len(known) and known[num_right] == drafts[num_right]:
            num_right += 1
        if num_right < len(known) or len(known) == len(drafts):
            row.untested = None
            self._acceptance.observe(row.shares, untested.drafts.evidence, len(drafts), num_right)
