"""The simulated device: takes plans, and is as late with their results as a cost model says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from raylm.core.step import CacheLayout, ModelInfo, StepPlan, StepResult
from raylm.sim.cost import DeviceCost

VOCAB_SIZE = 1 << 31
_TOKEN = 1


@dataclass(slots=True)
class _Row:
    known: int
    computed: int


class _Done(NamedTuple):
    at: float
    result: StepResult


class SimulatedExecutor:
    """An executor with the simulation's clock: `now` moves on to the end of a step when its result is asked for.

    It counts a row's tokens as a real worker does; all tokens that it samples are the same. Plans run one after
    another. There is no swap pool.
    """

    def __init__(self, cost: DeviceCost, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.now = 0.0
        self._cost = cost
        self._info = ModelInfo(
            num_blocks=num_blocks,
            num_host_blocks=0,
            layout=CacheLayout(block_size, [0]),
            block_bytes=0,
            prefill_tokens_per_s=0.0,
            swap_bytes_per_s=0.0,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[],
            device="simulated",
            dtype="none",
            phases={},
        )
        self._rows: dict[int, _Row] = {}
        self._done: deque[_Done] = deque()
        self._free_at = 0.0

    def clock(self) -> float:
        return self.now

    def start(self) -> ModelInfo:
        return self._info

    def submit(self, plan: StepPlan) -> None:
        """The plan starts now, or when those before it are done."""
        seconds, num_sampled = self._count(plan)
        self._free_at = max(self._free_at, self.now) + seconds
        self._done.append(_Done(self._free_at, StepResult(plan.step, [_TOKEN] * num_sampled)))

    def result(self) -> StepResult:
        self.now, result = self._done.popleft()
        return result

    def check(self) -> None:
        """Nobody here can die."""

    def shutdown(self) -> None:
        self._done.clear()

    def _count(self, plan: StepPlan) -> tuple[float, int]:
        """Let the plan's rows compute their tokens: how long that takes, and how many rows sample."""
        for new in plan.new_rows:
            self._rows[new.row] = _Row(len(new.token_ids), new.num_computed)
        num_prefill = num_decode = num_context = num_sampled = 0
        for index, count in zip(plan.rows, plan.num_tokens, strict=True):
            row = self._rows[index]
            row.computed += count
            num_context += row.computed
            if count == 1:
                num_decode += 1
            else:
                num_prefill += count
            if row.computed == row.known:
                row.known += 1
                num_sampled += 1
        return self._cost.seconds(num_prefill, num_decode, num_context), num_sampled
