"""Fabricated work: for memory to be measured, for a first step before the first request, and to learn speeds."""

from __future__ import annotations

import time

import torch

from raylm.core.rows import prompt_plan
from raylm.core.sampling import SamplingParams
from raylm.core.step import CacheLayout, Copies, RowSampling, StepPlan
from raylm.worker.kv_store import KVStore
from raylm.worker.model_runner import ModelRunner

_COPIED_BYTES = 256 << 20
"""What a trial of the copies moves at most, each way."""


def trial_plan(num_tokens: int, num_rows: int, layout: CacheLayout) -> StepPlan:
    """A step that spreads `num_tokens` over at most `num_rows` new requests, all of which sample and name the same
    blocks: what they keep there is of no use, and a cache for it may be small."""
    num_rows = min(num_rows, num_tokens)
    lens = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
    sampling = RowSampling(SamplingParams(temperature=1.0, top_p=0.9))
    plan = prompt_plan(0, [[0] * length for length in lens], sampling, layout)
    longest = plan.new_blocks[0].block_ids
    return plan._replace(new_blocks=[new._replace(block_ids=longest[: len(new.block_ids)]) for new in plan.new_blocks])


def last_block(plan: StepPlan) -> int:
    """The highest block that a plan names."""
    return max(block for new in plan.new_blocks for block in new.block_ids)


def prefill_tokens_per_s(runner: ModelRunner, plan: StepPlan) -> float:
    """How fast the plan's tokens are computed, once its kernels have run before and its graph, if any, is captured."""
    for _ in range(2):
        runner.execute(plan)
    began = time.perf_counter()
    runner.execute(plan)  # Its sampled tokens are on the host when it returns, so all of it is done.
    return plan.total_tokens / (time.perf_counter() - began)


def swap_bytes_per_s(store: KVStore, *, num_blocks: int, device: torch.device) -> float:
    """How fast blocks go to the host and back, at most `num_blocks` of them."""
    count = min(num_blocks, max(_COPIED_BYTES // store.block_bytes, 1))
    out = [(block, block - 1) for block in range(1, count + 1)]
    copies = Copies(swap_out=out, forked=[], swap_in=[(host, block) for block, host in out])
    for _ in range(2):  # The first one is a warm-up.
        began = time.perf_counter()
        store.copy(copies)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return 2 * count * store.block_bytes / seconds
