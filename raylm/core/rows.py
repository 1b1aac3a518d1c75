"""How rows count their tokens, for those who take plans without a device; and plans for trials and benches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raylm.core.step import CacheLayout, NewBlocks, NewRow, RowSampling, StepPlan


class RowStep(NamedTuple):
    """One row's part in a step: it computes the `num_tokens` tokens from position `first` on."""

    row: int
    first: int
    num_tokens: int
    num_drafts: int
    """The last so many of them are drafts: their values are not known."""
    samples: bool
    reports: bool
    """It gives candidates instead of a token."""

    @property
    def end(self) -> int:
        return self.first + self.num_tokens


class _Counts:
    __slots__ = ("computed", "known", "reports")

    def __init__(self, new: NewRow) -> None:
        self.known = len(new.token_ids)
        self.computed = new.num_computed
        self.reports = new.sampling.num_candidates > 0


class RowCounts:
    """Known and computed tokens of every row. Plans must be taken in order, and drafts that a step rejected be told
    before the next plan is taken."""

    def __init__(self) -> None:
        self._rows: dict[int, _Counts] = {}

    def take(self, plan: StepPlan) -> list[RowStep]:
        """What each of the plan's rows does, in the plan's order; the rows have done it from here on, with all drafts
        accepted."""
        for new in plan.new_rows:
            self._rows[new.row] = _Counts(new)
        for row, _ in plan.chosen:
            self._rows[row].known += 1
        return [self._step(row, count) for row, count in zip(plan.rows, plan.num_tokens, strict=True)]

    def reject(self, row: int, num_drafts: int) -> None:
        """The row's last step rejected so many drafts."""
        counts = self._rows[row]
        counts.known -= num_drafts
        counts.computed -= num_drafts

    def _step(self, row: int, num_tokens: int) -> RowStep:
        counts = self._rows[row]
        first, left = counts.computed, counts.known - counts.computed
        counts.computed += num_tokens
        is_last = num_tokens >= left
        if is_last and not counts.reports:
            counts.known = counts.computed + 1
        num_drafts = max(num_tokens - left, 0)
        return RowStep(row, first, num_tokens, num_drafts, is_last and not counts.reports, is_last and counts.reports)


def prompt_plan(step: int, prompts: Sequence[list[int]], sampling: RowSampling, layout: CacheLayout) -> StepPlan:
    """A step that computes whole prompts in rows 0, 1, ... and samples for each, in blocks from 1 on. All cache groups
    name the same blocks: what it computes is of no use."""
    new_rows, new_blocks, next_block = [], [], 1
    for row, prompt in enumerate(prompts):
        count = -(-len(prompt) // layout.block_size)
        blocks = list(range(next_block, next_block + count))
        next_block += count
        new_rows.append(NewRow(row, list(prompt), 0, sampling))
        new_blocks += [NewBlocks(row, group, 0, blocks) for group in range(len(layout.windows))]
    return StepPlan(step, new_rows, new_blocks, list(range(len(prompts))), [len(prompt) for prompt in prompts])


def decode_plan(
    step: int, rows: Sequence[int], new_blocks: Sequence[NewBlocks] = (), *, num_drafts: int = 0
) -> StepPlan:
    """A step in which every row samples after its last token, and after each of `num_drafts` drafts."""
    return StepPlan(step, [], list(new_blocks), list(rows), [1 + num_drafts] * len(rows))
