"""The stage for structured output: only tokens that a row's grammar allows are sampled.

Masks are filled on the host while the device runs the step's forward. What they need of the steps before, tokens that
only the device knows yet, is asked for before that forward is queued: the copy is done when the step before is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.core.step import RowSampling, StepPlan
from raylm.grammar.matchers import GrammarMatchers
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.stages import LogitRows, RowNotes
from raylm.worker.transfer import Download

_BROKEN = (
    "structure: the text does not meet its grammar any more, as happens where a logits processor forbids all tokens "
    "that the grammar allows"
)


class _News(NamedTuple):
    """Tokens of rows on their way to the host: row i's from position first[i] on, and how many of its are known."""

    rows: list[int]
    first: list[int]
    download: Download


class GrammarStage:
    """params.structure: a mask for every logits of a row whose grammar has begun."""

    def __init__(
        self, table: RequestTable, matchers: GrammarMatchers | None, notes: RowNotes, *, tells_forced: bool = False
    ) -> None:
        """Without matchers rows with a grammar are sampled elsewhere: this worker has a stage of the model that samples
        nothing. With `tells_forced` it is noted what grammars force rows to say."""
        self._table = table
        self._matchers = matchers
        self._notes = notes
        self._tells_forced = tells_forced
        self._told: dict[int, tuple[int, list[int]]] = {}
        """What was noted last of a row: the first position and the tokens, while they are what the row says."""
        self._has_grammar = np.zeros(table.num_rows, dtype=np.bool_)
        self._num_seen = np.zeros(table.num_rows, dtype=np.int64)
        """Tokens of each row that its matcher has accepted; before the first, those of the prompt."""
        self._news: _News | None = None

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        structure = sampling.params.structure
        if self._matchers is None:
            return False
        if self._has_grammar[row]:
            self._matchers.forget(row)
        self._has_grammar[row] = structure is not None
        self._told.pop(row, None)
        if structure is None:
            return False
        self._matchers.begin(row, structure, sampling.stop_ids)
        self._num_seen[row] = sampling.num_prompt
        return True

    def ask(self, plan: StepPlan) -> None:
        """Ask for what the rows of a plan have generated since their last step, and for the drafts that they verify:
        after the table has taken the plan, and before anything of its step is queued."""
        self._news = None
        if not self._has_grammar.any():
            return
        rows = np.array(plan.rows, dtype=np.int64)
        picked = np.flatnonzero(self._has_grammar[rows])
        if not len(picked):
            return
        rows = rows[picked]
        first = self._num_seen[rows]
        ends = self._table.computed_bound[rows] + np.array(plan.num_tokens, dtype=np.int64)[picked]
        most = max(int((ends - first).max()), 1)
        on_device, begins = self._table.upload(rows, first)
        columns = begins[:, None] + torch.arange(most, device=self._table.device)
        columns = columns.clamp_(max=self._table.token_ids.shape[1] - 1)
        tokens = self._table.token_ids[on_device[:, None], columns]
        known = self._table.num_known.index_select(0, on_device)
        self._news = _News(rows.tolist(), first.tolist(), Download([tokens, known], self._table.device))

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        assert self._matchers is not None, "a row has a grammar"
        places = np.flatnonzero(self._has_grammar[of.rows])
        rows, counts = np.unique(of.rows[places], return_counts=True)
        drafts = self._take_news(dict(zip(rows.tolist(), counts.tolist(), strict=True)))
        masks = np.empty((len(places), self._matchers.num_words), dtype=np.int32)
        # The logits of a row stand together, in the plan's order of rows.
        order = list(dict.fromkeys(of.rows[places].tolist()))
        looks = [self._tells_forced and self._is_news(row, len(drafts[row])) for row in order]
        are_masked, forced, broken = self._matchers.fill(order, [drafts[row] for row in order], masks, looks)
        self._note(order, forced, broken)
        if not are_masked.any():
            return logits
        mask_rows = np.full(len(of.rows), -1, dtype=np.int64)
        mask_rows[places[are_masked]] = np.arange(int(are_masked.sum()))
        bitmask, which = self._table.upload(masks[are_masked].reshape(-1), mask_rows)
        ops.mask_logits(logits, bitmask.view(-1, masks.shape[1]), which)
        return logits

    def _is_news(self, row: int, num_drafts: int) -> bool:
        """Whether what the row must say behind its drafts was not noted before."""
        first, tokens = self._told.get(row, (0, []))
        return first + len(tokens) <= self._num_seen[row] + num_drafts

    def _note(self, rows: list[int], forced: list[tuple[int, int, list[int]]], broken: list[int]) -> None:
        for index, num_drafts, tokens in forced:
            first = int(self._num_seen[rows[index]]) + num_drafts
            self._told[rows[index]] = first, tokens
            # The first of them is sampled by this step anyway.
            if len(tokens) > 1:
                self._notes.force(rows[index], first, tokens)
        for index in broken:
            self._notes.fail(rows[index], _BROKEN)

    def _take_news(self, num_logits: dict[int, int]) -> dict[int, list[int]]:
        """Take in what rows have generated; the drafts that each verifies, of rows that have so many logits."""
        assert self._matchers is not None and self._news is not None, "the step's plan was asked about"
        rows, first, download = self._news
        tokens, known = download.get()
        drafts = {}
        for row, begin, line, count in zip(rows, first, tokens.tolist(), known.tolist(), strict=True):
            if row in num_logits:
                num_new = count - begin
                self._matchers.accept(row, line[:num_new])
                self._compare(row, begin, line[:num_new])
                self._num_seen[row] = count
                drafts[row] = line[num_new : num_new + num_logits[row] - 1]
        return drafts

    def _compare(self, row: int, first: int, token_ids: list[int]) -> None:
        """The row has said these tokens. Where they are not the forced ones, its text was cut otherwise, and what it
        must say is found out anew."""
        told = self._told.get(row)
        if told is None or not token_ids:
            return
        begin = max(first, told[0])
        expected = told[1][begin - told[0] : first + len(token_ids) - told[0]]
        if expected != token_ids[begin - first :][: len(expected)]:
            del self._told[row]
