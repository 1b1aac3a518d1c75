"""A worker without a model: it keeps rows and a paged cache as the real one does, and checks every step against them.

The cache remembers which token was written to which slot. A step reads back all slots of its rows through their block
tables, so a block in two hands, a block freed too early or a token out of order fails at once. The next token is a
hash of all tokens before it: any lost or repeated token changes everything after it.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

from raylm.core.sampling import SamplingParams
from raylm.core.step import ModelInfo, StepPlan, StepResult

VOCAB = 64
EOS = 0


def next_token(tokens: list[int]) -> int:
    """What the fake model says after `tokens`."""
    return zlib.crc32(bytes(tokens)) % VOCAB


def expected_tokens(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """The output and finish reason of one request, run alone and naively."""
    tokens = list(prompt)
    limit = max_model_len if params.max_tokens is None else min(max_model_len, len(prompt) + params.max_tokens)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= limit:
            return tokens[len(prompt) :], "length"


@dataclass
class _Row:
    tokens: list[int]
    computed: int
    blocks: list[int] = field(default_factory=list)


class FakeExecutor:
    """Runs plans on the fake worker; results come in order, when they are asked for."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 64, budget: int = 1 << 30):
        self.info = ModelInfo(num_blocks, max_model_len, VOCAB, [EOS], "fake", "float32", {})
        self.block_size = block_size
        self.budget = budget
        self.rows: dict[int, _Row] = {}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.plans: deque[StepPlan] = deque()
        self.num_steps = 0
        self.fail_at: int | None = None

    def start(self) -> ModelInfo:
        return self.info

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def result(self) -> StepResult:
        self.num_steps += 1
        if self.fail_at is not None and self.num_steps >= self.fail_at:
            raise RuntimeError("the fake worker was told to fail")
        return self._execute(self.plans.popleft())

    def shutdown(self) -> None:
        self.plans.clear()

    def _execute(self, plan: StepPlan) -> StepResult:
        assert 0 < plan.total_tokens <= self.budget
        assert len(set(plan.rows)) == len(plan.rows)
        assert all(count > 0 for count in plan.num_tokens)
        for new in plan.new_rows:
            self.rows[new.row] = _Row(list(new.token_ids), new.num_computed)
        for row, added in zip(plan.rows, plan.new_blocks, strict=True):
            self.rows[row].blocks += added
        # All of a step's writes come before its reads, as in the kernels.
        for row, count in zip(plan.rows, plan.num_tokens, strict=True):
            self._write(self.rows[row], count)
        sampled = []
        for row in plan.rows:
            if (token := self._sample(self.rows[row])) is not None:
                sampled.append(token)
        return StepResult(plan.step, sampled)

    def _write(self, row: _Row, count: int) -> None:
        assert row.computed + count <= len(row.tokens), "a step computes tokens that are not known"
        for position in range(row.computed, row.computed + count):
            block = row.blocks[position // self.block_size]
            assert 0 < block < self.info.num_blocks
            self.slots[block, position % self.block_size] = (position, row.tokens[position])
        row.computed += count

    def _sample(self, row: _Row) -> int | None:
        for position in range(row.computed):
            slot = (row.blocks[position // self.block_size], position % self.block_size)
            assert self.slots[slot] == (position, row.tokens[position]), "the cache holds another request's token"
        if row.computed < len(row.tokens):
            return None
        row.tokens.append(next_token(row.tokens))
        return row.tokens[-1]
