"""One stage's part in a pipeline: where its inputs come from and where its outputs go."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raylm.core.step import NewRow, StepPlan
from raylm.parallel.context import ParallelContext
from raylm.parallel.stages import StageLinks
from raylm.worker.request_table import RequestTable


@dataclass(slots=True)
class _Due:
    """Tokens of a step that the last stage is to send: the rows that sample and the cells for their tokens, [count]."""

    step: int
    rows: np.ndarray
    cells: np.ndarray


class PipelineStage:
    """Passes hidden states on, and brings sampled tokens from the last stage into the first one's table.

    All stages get the same plans and keep the same rows, so each knows what the others send. The first stage takes the
    tokens of a step before the first step that needs them, and at the latest `pipeline_size` steps later: by then the
    last stage is about to have sampled them, and sends never pile up.
    """

    def __init__(
        self, context: ParallelContext, links: StageLinks, table: RequestTable, *, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self._context = context
        self._links = links
        self._table = table
        self._hidden = (hidden_size, dtype)
        self._due: deque[_Due] = deque()
        self._num_steps = 0

    def begin(self, plan: StepPlan) -> None:
        """Make ready for a plan, before the table takes it in."""
        self._num_steps += 1
        if not self._due:
            return
        self._forget(plan.new_rows)
        num_needed, rows = 0, np.array(plan.rows)
        for count, due in enumerate(self._due, 1):
            if due.step + self._context.pipeline_size <= self._num_steps or np.isin(due.rows, rows).any():
                num_needed = count
        self._take_tokens(num_needed)

    def receive(self, num_tokens: int) -> Tensor | None:
        """What the stage before made of a step's tokens, [num_tokens, hidden_size]; None at the first stage."""
        if self._context.is_first_stage:
            return None
        return self._links.receive_hidden(num_tokens, *self._hidden)

    def pass_on(self, hidden: Tensor, sample_rows: np.ndarray) -> None:
        """End a step of this stage, unless it is the last one. Nobody may write into `hidden` any more."""
        self._links.send_hidden(hidden)
        table = self._table
        rows = sample_rows[table.num_candidates[sample_rows] == 0]
        if not rows.size:
            return
        if self._context.is_first_stage:
            self._due.append(_Due(self._num_steps, rows, table.token_cells(rows, table.num_known[rows])))
        table.num_known[rows] += 1

    def send_tokens(self, token_ids: Tensor | None) -> None:
        """End a step of the last stage. Nobody may write into `token_ids` any more."""
        if token_ids is not None:
            self._links.send_tokens(token_ids)

    def drain(self) -> None:
        """Take every token that is due: no step follows for a while."""
        self._take_tokens(len(self._due))

    def _take_tokens(self, count: int) -> None:
        for _ in range(count):
            due = self._due.popleft()
            token_ids = self._links.receive_tokens(len(due.cells))
            self._table.write_tokens(self._table.upload(due.cells)[0], token_ids)

    def _forget(self, new_rows: list[NewRow]) -> None:
        """Tokens of requests that have ended meanwhile must not get into the rows of those that come after them."""
        taken = [new.row for new in new_rows]
        if not taken:
            return
        padding = self._table.padding_row
        for due in self._due:
            stale = np.isin(due.rows, taken)
            due.rows = np.where(stale, padding, due.rows)
            due.cells = np.where(stale, self._table.token_cells(np.array(padding), np.array(1)), due.cells)
