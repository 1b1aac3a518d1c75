"""The simulated device: takes plans, and is as late with their results as a cost model says."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from raylm.core.control import WorkerControl
from raylm.core.rows import RowCounts
from raylm.core.step import CacheLayout, ModelInfo, Sampled, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.sim.cost import DeviceCost

VOCAB_SIZE = 1 << 31
_TOKEN = 1


class _Done(NamedTuple):
    at: float
    result: Sampled


class SimulatedExecutor:
    """An executor with the simulation's clock: `now` moves on to the end of a step when its result is asked for.

    All tokens that it samples are the same, and every draft is accepted. Plans run one after another. There is no swap
    pool.
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
            cache_dtype="none",
            phases={},
        )
        self._rows = RowCounts()
        self._done: deque[_Done] = deque()
        self._free_at = 0.0

    def clock(self) -> float:
        return self.now

    def start(self) -> ModelInfo:
        return self._info

    def prepare(self, structure: StructuredOutput) -> None:
        """Grammars cost nothing here."""

    def submit(self, plan: StepPlan) -> None:
        """The plan starts now, or when those before it are done."""
        seconds, counts = self._count(plan)
        self._free_at = max(self._free_at, self.now) + seconds
        tokens = [_TOKEN] * sum(counts)
        result = Sampled(plan.step, tokens) if len(tokens) == len(counts) else Sampled(plan.step, tokens, counts)
        self._done.append(_Done(self._free_at, result))

    @property
    def done(self) -> bool:
        return self._done[0].at <= self.now

    def result(self) -> Sampled:
        at, result = self._done.popleft()
        self.now = max(self.now, at)
        return result

    def control(self, op: WorkerControl) -> list[str]:
        return ["there is nothing to record"]

    def check(self) -> None:
        """Nobody here can die."""

    def shutdown(self) -> None:
        self._done.clear()

    def _count(self, plan: StepPlan) -> tuple[float, list[int]]:
        """Let the plan's rows compute their tokens: how long that takes, and the tokens of each row that samples."""
        num_prefill = num_decode = num_context = 0
        counts = []
        for step in self._rows.take(plan):
            num_context += step.end
            if step.num_tokens - step.num_drafts == 1:
                num_decode += step.num_tokens
            else:
                num_prefill += step.num_tokens
            if step.samples:
                counts.append(1 + step.num_drafts)
        return self._cost.seconds(num_prefill, num_decode, num_context), counts
