"""A plan while it is made."""

from __future__ import annotations

from raylm.core.drafting import Proposal
from raylm.core.pacing import PrefillBudget
from raylm.core.request import Request
from raylm.core.step import Copies, Drafts, NewBlocks, NewRow, StepPlan


class PlanBuilder:
    """What a step holds so far, and what is left of its token budget.

    Plain decodes are appended to `rows` and `sampling` by the scheduler's loop itself, for speed, and their blocks to
    `new_blocks`; all else goes through add() and add_blocks().
    """

    def __init__(self, budget: int, for_prompts: PrefillBudget, swapped_out: dict[int, int]) -> None:
        """`swapped_out`: the device block that the step copies into each host block; swap_out() adds to it."""
        self.rows: list[int] = []
        self.sampling: list[Request] = []
        self.verifying: dict[int, Proposal] = {}
        """What a request verifies, by its index in `sampling`."""
        self.reporting: list[Request] = []
        self.reporting_prompts: list[tuple[Request, int]] = []
        """Requests whose step gives log probabilities of their prompt, and the first position that it computes."""
        self.new_blocks: list[NewBlocks] = []
        self.num_prefill = 0
        """Tokens that rows with several known ones compute together."""
        self.for_prompts = for_prompts
        self._budget = budget
        self._longer: list[tuple[int, int]] = []
        self._num_surplus = 0
        self._new_rows: list[NewRow] = []
        self._swapped_out = swapped_out
        self._drafts: list[Drafts] = []
        self._forked: list[tuple[int, int]] = []
        self._swapped_in: list[tuple[int, int]] = []

    @property
    def left(self) -> int:
        """Tokens that the step may still compute."""
        return self._budget - len(self.rows) - self._num_surplus

    def room(self, num_tokens: int, *, reserved: int) -> int:
        """How many of `num_tokens` known tokens a request may compute while `reserved` tokens stay for others.

        One token always counts as decode; more are a prompt, for which `for_prompts` holds too.
        """
        left = min(num_tokens, self.left - reserved)
        if num_tokens == 1:
            return left
        return min(left, self.for_prompts.tokens - self.num_prefill, self.for_prompts.of_one)

    def add(self, request: Request, num_tokens: int) -> None:
        """The request computes its next `num_tokens` known tokens, and samples when none is left."""
        if request.reports_prompt:
            self.reporting_prompts.append((request, request.num_computed))
        if request.num_to_compute > 1:
            self.num_prefill += num_tokens
        self._add(request, num_tokens)

    def verify(self, request: Request, proposal: Proposal) -> None:
        """The request, of which one known token is left to compute, verifies drafts with it."""
        self.verifying[len(self.sampling)] = proposal
        if proposal.token_ids:
            self._drafts.append(Drafts(request.row, len(request.token_ids), proposal.token_ids))
        self._add(request, 1 + proposal.num_drafts)

    def _add(self, request: Request, num_tokens: int) -> None:
        if num_tokens > 1:
            self._longer.append((len(self.rows), num_tokens))
            self._num_surplus += num_tokens - 1
        self.rows.append(request.row)
        if not request.plan(num_tokens):
            return
        if request.search is not None:
            request.is_reporting = True
            self.reporting.append(request)
        else:
            self.sampling.append(request)

    def add_row(self, request: Request) -> None:
        """The request takes its row."""
        self._new_rows.append(NewRow(request.row, list(request.token_ids), request.num_computed, request.sampling))

    def add_blocks(self, blocks: list[NewBlocks]) -> None:
        self.new_blocks += [one for one in blocks if one.block_ids]

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        self._swapped_out.update((host, block) for block, host in pairs)

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        self._swapped_in += pairs

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        self._forked += pairs

    def plan(self, step: int, chosen: list[tuple[int, int]], bounds: list[tuple[int, int]]) -> StepPlan:
        """The finished plan; `chosen` and `bounds` are StepPlan's."""
        num_tokens = [1] * len(self.rows)
        for index, count in self._longer:
            num_tokens[index] = count
        swapped_out = [(block, host) for host, block in self._swapped_out.items()]
        moves = Copies(swapped_out, self._forked, self._swapped_in)
        copies = moves if any(moves) else None
        return StepPlan(
            step, self._new_rows, self.new_blocks, self.rows, num_tokens, copies, chosen, self._drafts, bounds
        )
