"""thinking_token_budget."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raylm.core.step import RowSampling
from raylm.worker.request_table import RequestTable
from raylm.worker.sampling.stages import ROWS_AT_A_TIME, LogitRows
from raylm.worker.sampling.tokens import RowArrays

_NO_TOKEN = -1
_OUTSIDE = -2
"""In place of tokens that the completion does not have: no mark holds it."""
_MAX_COMPARED = 1 << 22
"""Tokens of completions that are compared at the same time, which bounds the memory that it takes."""


class _Marks:
    """A mark of each row, a sequence of tokens: the last one first, filled up with _NO_TOKEN."""

    def __init__(self, table: RequestTable) -> None:
        self._rows = RowArrays(table, fill=_NO_TOKEN, dtype=torch.int64)
        self.lens = np.zeros(table.num_rows, dtype=np.int64)

    def put(self, row: int, mark: tuple[int, ...]) -> None:
        self.lens[row] = len(mark)
        width = max(self._rows.values.shape[1], len(mark), 1)
        self._rows.put(row, np.array([*mark[::-1], *[_NO_TOKEN] * (width - len(mark))], dtype=np.int64))

    def of(self, rows: Tensor) -> Tensor:
        """int64 [count, width]."""
        return self._rows.values.index_select(0, rows)


class _Asked(NamedTuple):
    """Logits of rows with a budget; tensors of [count]."""

    index: Tensor
    """Which logits."""
    first: Tensor
    """Position of the row's first generated token."""
    budget: Tensor
    begun: Tensor
    """Not 0 where the prompt ends inside a section."""
    begin_len: Tensor
    end_len: Tensor


class Thinking:
    """Forces the end mark of a thinking section that has as many tokens as its budget.

    A section begins behind the begin mark, or with the completion where the prompt has begun one, and ends behind the
    end mark. The budget holds for each section of its own. Where a section's last tokens are the beginning of the end
    mark already, only the rest is forced.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._begin, self._end = _Marks(table), _Marks(table)
        self._has_budget = np.zeros(table.num_rows, dtype=np.bool_)
        self._budget = np.zeros(table.num_rows, dtype=np.int64)
        self._first = np.zeros(table.num_rows, dtype=np.int64)
        self._begun = np.zeros(table.num_rows, dtype=np.int32)

    def set_row(self, row: int, sampling: RowSampling) -> bool:
        section, budget = sampling.params.thinking, sampling.params.thinking_token_budget
        self._has_budget[row] = False
        if section is None or budget < 0:
            return False
        self._has_budget[row] = True
        self._budget[row], self._first[row], self._begun[row] = budget, sampling.num_prompt, section.begun
        self._begin.put(row, section.begin)
        self._end.put(row, section.end)
        return True

    def apply(self, logits: Tensor, of: LogitRows) -> Tensor:
        wanted = np.flatnonzero(self._has_budget[of.rows])
        rows = of.rows[wanted]
        width = max(int((self._table.known_bound[rows] - self._first[rows]).max()), 1)
        arrays = self._table.upload(
            wanted,
            self._first[rows],
            self._budget[rows],
            self._begun[rows],
            self._begin.lens[rows],
            self._end.lens[rows],
        )
        at_a_time = max(1, min(ROWS_AT_A_TIME, _MAX_COMPARED // width))
        for part in zip(*(array.split(at_a_time) for array in arrays), strict=True):
            self._force(logits, of, _Asked(*part), width)
        return logits

    def _force(self, logits: Tensor, of: LogitRows, asked: _Asked, width: int) -> None:
        rows = of.table_rows.index_select(0, asked.index)
        num_generated = of.positions.index_select(0, asked.index) - asked.first
        tokens = self._completions(rows, asked.first, num_generated, width)
        ends = self._end.of(rows)
        last_end = _last_place(_marked(tokens, ends))
        begins = _marked(tokens, self._begin.of(rows)) & (asked.begin_len > 0)[:, None]
        start = _first_place(begins, last_end + asked.begin_len, width)
        start = torch.where((asked.begun != 0) & (last_end == 0), 0, start)
        is_over = num_generated - start >= asked.budget
        full = start + asked.budget
        said = _num_said(tokens, ends, full, torch.minimum(asked.end_len - 1, asked.budget))
        # Behind a draft that is not the forced token the count goes on; what is forced there does not matter.
        turn = (said + num_generated - full).clamp_min(0).minimum(asked.end_len - 1)
        forced = ends.gather(1, (asked.end_len - 1 - turn)[:, None])
        own = logits.index_select(0, asked.index)
        left = torch.full_like(own, -torch.inf).scatter_(1, forced, 0.0)
        logits.index_copy_(0, asked.index, torch.where(is_over[:, None], left, own))

    def _completions(self, rows: Tensor, first: Tensor, num_generated: Tensor, width: int) -> Tensor:
        """Generated tokens of rows, int32 [count, width]."""
        table = self._table.token_ids
        columns = torch.arange(width, device=table.device)
        cells = (first[:, None] + columns).clamp_(max=table.shape[1] - 1)
        return torch.where(columns < num_generated[:, None], table[rows[:, None], cells], _OUTSIDE)


def _marked(tokens: Tensor, marks: Tensor) -> Tensor:
    """bool [count, width]: a row's mark ends with this token."""
    found = torch.ones_like(tokens, dtype=torch.bool)
    for back in range(marks.shape[1]):
        mark = marks[:, back, None]
        shifted = torch.full_like(tokens, _OUTSIDE)
        shifted[:, back:] = tokens[:, : tokens.shape[1] - back]
        found &= (shifted == mark) | (mark == _NO_TOKEN)
    return found


def _last_place(found: Tensor) -> Tensor:
    """int64 [count]: how many tokens stand before what follows the last mark; 0 without one."""
    places = torch.arange(1, found.shape[1] + 1, device=found.device)
    return torch.where(found, places, 0).amax(dim=1)


def _first_place(found: Tensor, least: Tensor, width: int) -> Tensor:
    """int64 [count]: how many tokens stand before what follows the first mark that ends behind `least` tokens or more;
    without one more than `width`."""
    places = torch.arange(1, width + 1, device=found.device)
    return torch.where(found & (places >= least[:, None]), places, 2 * width + 1).amin(dim=1)


def _num_said(tokens: Tensor, ends: Tensor, full: Tensor, most: Tensor) -> Tensor:
    """int64 [count]: how many tokens of the end mark the first `full` tokens end with, at most `most`."""
    width = ends.shape[1]
    lens = (ends != _NO_TOKEN).sum(dim=1)
    said = torch.zeros_like(full)
    for count in range(1, width):
        # The mark is written from its end: its first `count` tokens are the last ones before the filling.
        back = torch.arange(count, device=tokens.device)
        part = ends.gather(1, (lens[:, None] - count + back).clamp_min(0))
        cells = (full[:, None] - 1 - back).clamp(0, tokens.shape[1] - 1)
        is_said = (tokens.gather(1, cells) == part).all(dim=1) & (count <= most)
        said = torch.where(is_said, count, said)
    return said
