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
from raylm.worker.input_batch import StepRows, starts
from raylm.worker.request_table import RequestTable


@dataclass(slots=True)
class _Due:
    """Tokens of a step that the last stage is to send: of the rows that sample, [count] each, and what they compute."""

    step: int
    rows: np.ndarray
    query_lens: np.ndarray
    num_sampled: np.ndarray


class PipelineStage:
    """Passes hidden states on, and brings sampled tokens from the last stage into the tables of all others.

    All stages get the same plans and keep the same rows, so each knows what the others send, and accepts the same
    drafts. A stage takes the tokens of a step before the first step that needs them, and at the latest `pipeline_size`
    steps later: by then the last stage is about to have sampled them, and sends never pile up.
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

    def pass_on(self, hidden: Tensor, step: StepRows) -> None:
        """End a step of this stage, unless it is the last one. Nobody may write into `hidden` any more."""
        self._links.send_hidden(hidden)
        samples = step.num_sampled > 0
        if samples.any():
            parts = step.rows[samples], step.query_lens[samples], step.num_sampled[samples]
            self._due.append(_Due(self._num_steps, *parts))
        if not samples.all():
            # What samples nothing may go on at once.
            others = step.rows[~samples], step.query_lens[~samples], step.num_sampled[~samples]
            self._accept(*others, torch.empty(0, dtype=torch.int64, device=self._table.device))

    def send_tokens(self, token_ids: Tensor) -> None:
        """End a step of the last stage that sampled. Nobody may write into `token_ids` any more."""
        self._links.send_tokens(token_ids)

    def drain(self) -> None:
        """Take every token that is due: no step follows for a while."""
        self._take_tokens(len(self._due))

    def _take_tokens(self, count: int) -> None:
        for _ in range(count):
            due = self._due.popleft()
            token_ids = self._links.receive_tokens(int(due.num_sampled.sum()))
            self._accept(due.rows, due.query_lens, due.num_sampled, token_ids)

    def _accept(self, rows: np.ndarray, query_lens: np.ndarray, num_sampled: np.ndarray, token_ids: Tensor) -> None:
        table = self._table
        table.accept(*table.upload(rows, starts(query_lens), starts(num_sampled)), token_ids)

    def _forget(self, new_rows: list[NewRow]) -> None:
        """Tokens of requests that have ended meanwhile must not get into the rows of those that come after them."""
        taken = [new.row for new in new_rows]
        if not taken:
            return
        for due in self._due:
            due.rows = np.where(np.isin(due.rows, taken), self._table.padding_row, due.rows)
