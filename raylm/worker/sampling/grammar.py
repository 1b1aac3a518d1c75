"""The stage for structured output: only tokens that a row's grammar allows are sampled.

Masks are filled on the host, in a thread of their own, while the step's forward is queued and the device runs it. What
they need of the steps before, tokens that only the device knows yet, is asked for before that forward is queued: the
copy is done when the step before is.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raylm import ops
from raylm.core.step import RowSampling, StepPlan
from raylm.grammar.matchers import Filled, GrammarMatchers
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.stages import LogitRows, RowNotes
from raylm.worker.transfer import Download


class _Asked(NamedTuple):
    """Rows of a step that sample, in the plan's order. The tokens of rows[i] from position first[i] on, and its number
    of known tokens, are being downloaded. rows[i] has num_logits[i] logits: after its last known token, and after each
    of its drafts."""

    rows: list[int]
    first: list[int]
    num_logits: list[int]
    download: Download


class _Masks(NamedTuple):
    """The masks of a step's logits of rows with a grammar, int32 [N, words], and what filling them has told."""

    words: np.ndarray
    rows: list[int]
    filled: Filled


class GrammarStage:
    """params.structure: a mask for every logits of a row whose grammar has begun."""

    def __init__(
        self, table: RequestTable, matchers: GrammarMatchers | None, notes: RowNotes, *, tells_forced: bool = False
    ) -> None:
        """Without matchers rows with a grammar are sampled elsewhere: this worker has a stage of the model that samples
        nothing. With `tells_forced` the tokens that grammars force are noted."""
        self._table = table
        self._matchers = matchers
        self._notes = notes
        self._tells_forced = tells_forced
        self._told: dict[int, tuple[int, list[int]]] = {}
        """What was noted last of a row: the first position and the tokens, while they are what the row says."""
        self._has_grammar = np.zeros(table.num_rows, dtype=np.bool_)
        self._num_seen = np.zeros(table.num_rows, dtype=np.int64)
        """Tokens of each row that its matcher has accepted; before the first, those of the prompt."""
        self._thread = _mask_thread(table.device)
        self._masks: Future[_Masks] | None = None
        """Of the step that is being queued."""

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
        """Have the masks of a plan's rows filled beside what follows: after the table has taken the plan, and before
        anything of its step is queued."""
        self._masks = None
        if not self._has_grammar.any():
            return
        table, rows = self._table, np.array(plan.rows, dtype=np.int64)
        num_tokens = np.array(plan.num_tokens, dtype=np.int64)
        left = table.known_bound[rows] - table.computed_bound[rows]
        picked = self._has_grammar[rows] & (num_tokens >= left)
        if not picked.any():
            return
        rows, num_logits = rows[picked], 1 + (num_tokens - left)[picked]
        first = self._num_seen[rows]
        ends = table.computed_bound[rows] + num_tokens[picked]
        most = max(int((ends - first).max()), 1)
        on_device, begins = table.upload(rows, first)
        columns = begins[:, None] + torch.arange(most, device=table.device)
        columns = columns.clamp_(max=table.token_ids.shape[1] - 1)
        tokens = table.token_ids[on_device[:, None], columns]
        known = table.num_known.index_select(0, on_device)
        asked = _Asked(rows.tolist(), first.tolist(), num_logits.tolist(), Download([tokens, known], table.device))
        self._masks = self._thread.submit(self._fill, asked)

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        assert self._masks is not None, "the step's plan was asked about"
        words, rows, filled = self._masks.result()
        self._note(rows, filled)
        are_masked = filled.counts
        if not are_masked.any():
            return logits
        places = np.flatnonzero(self._has_grammar[of.rows])
        if not are_masked.all():
            places, words = places[are_masked], words[are_masked]
        mask_rows = np.full(len(of.rows), -1, dtype=np.int64)
        mask_rows[places] = np.arange(len(places))
        bitmask, which = self._table.upload(words.reshape(-1), mask_rows)
        ops.mask_logits(logits, bitmask.view(words.shape), which)
        return logits

    def _fill(self, asked: _Asked) -> _Masks:
        """In the thread of the masks."""
        assert self._matchers is not None, "a row has a grammar"
        drafts = self._take_news(asked)
        words = np.empty((sum(asked.num_logits), self._matchers.num_words), dtype=np.int32)
        looks = [
            self._tells_forced and self._is_news(row, len(own)) for row, own in zip(asked.rows, drafts, strict=True)
        ]
        return _Masks(words, asked.rows, self._matchers.fill(asked.rows, drafts, words, looks))

    def _is_news(self, row: int, num_drafts: int) -> bool:
        """Whether what the row must say behind its drafts was not noted before."""
        first, tokens = self._told.get(row, (0, []))
        return first + len(tokens) <= self._num_seen[row] + num_drafts

    def _note(self, rows: list[int], filled: Filled) -> None:
        for index, num_drafts, tokens in filled.forced:
            first = int(self._num_seen[rows[index]]) + num_drafts
            self._told[rows[index]] = first, tokens
            # The first of them is sampled by this step anyway.
            if len(tokens) > 1:
                self._notes.force(rows[index], first, tokens)
        for index, reason in filled.broken:
            self._notes.fail(rows[index], reason)

    def _take_news(self, asked: _Asked) -> list[list[int]]:
        """Take in what rows have generated; the drafts that each verifies."""
        assert self._matchers is not None, "a row has a grammar"
        tokens, known = asked.download.get()
        drafts = []
        told = zip(asked.rows, asked.first, asked.num_logits, tokens.tolist(), known.tolist(), strict=True)
        for row, begin, num_logits, line, count in told:
            num_new = count - begin
            self._matchers.accept(row, line[:num_new])
            self._compare(row, begin, line[:num_new])
            self._num_seen[row] = count
            drafts.append(line[num_new : num_new + num_logits - 1])
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


def _mask_thread(device: torch.device) -> ThreadPoolExecutor:
    name = "masks"
    if device.type != "cuda":
        return ThreadPoolExecutor(1, thread_name_prefix=name)
    # A thread begins on the first GPU, whatever others are on, and would take memory of it for a context.
    index = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(index,))
