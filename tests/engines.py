"""Engines on the fake worker, and what is true of their state at any time."""

from __future__ import annotations

from collections import Counter

from fakes import FakeExecutor

from raylm.config.engine import CacheConfig, ModelConfig, ParallelConfig
from raylm.config.resolve import ResolvedEngine, ResolvedRuntime, ResolvedScheduler
from raylm.core.drafting import Drafter
from raylm.core.request import Status
from raylm.core.step import Logprobs, join_logprobs
from raylm.engine.engine import Engine


def make_engine(
    executor: FakeExecutor,
    *,
    window: int = 1,
    num_stages: int = 1,
    max_num_seqs: int = 8,
    budget: int = 64,
    queue: int = 1024,
    prefix_caching: bool = True,
    clock=lambda: 0.0,
    text_ends=None,
    drafter: Drafter | None = None,
    **scheduler,
) -> Engine:
    executor.budget = budget
    config = ResolvedEngine(
        model=ModelConfig(path="fake"),
        cache=CacheConfig(block_size=executor.block_size, prefix_caching=prefix_caching, events=True),
        scheduler=ResolvedScheduler(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_queued_requests=queue, **scheduler
        ),
        parallel=ParallelConfig(pipeline=num_stages),
        runtime=ResolvedRuntime(step_timeout_s=60.0),
    )
    return Engine(config, executor, plans_in_flight=window, clock=clock, text_ends=text_ends, drafter=drafter)


class Collected:
    """Tokens of each request as they come, checked for order and for an end."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, Logprobs | None] = {}
        self.prompts: dict[str, Logprobs] = {}
        self.reasons: dict[str, str] = {}
        self.cached: Counter[str] = Counter()

    def take(self, deltas) -> None:
        for delta in deltas:
            assert delta.request_id not in self.reasons, "a token after the end"
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.cached[delta.request_id] += delta.num_cached_tokens
            self.logprobs[delta.request_id] = join_logprobs([self.logprobs.get(delta.request_id), delta.logprobs])
            if delta.prompt_logprobs is not None:
                assert delta.request_id not in self.prompts, "a prompt is told once"
                self.prompts[delta.request_id] = delta.prompt_logprobs
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason


def run_to_end(engine: Engine) -> Collected:
    collected = Collected()
    for _ in range(10_000):
        if not engine.has_work:
            return collected
        collected.take(engine.step())
    raise AssertionError("the engine did not come to an end")


def audit(engine: Engine) -> None:
    """Every block is free or held as often as requests hold it; what can be found is where it should be."""
    scheduler = engine._scheduler
    pool = scheduler._cache._pool
    held: Counter[int] = Counter()
    for request in scheduler._requests.values():
        assert len({len(blocks) for blocks in request.block_ids}) == 1
        for blocks in request.block_ids:
            held.update(block for block in blocks if block)
        if request.status is Status.RUNNING:
            assert request.num_computed <= request.num_slots
            assert request.num_computed <= request.num_known
    for block in range(1, pool.num_blocks):
        assert pool._refs[block] == held[block], f"block {block}"
        assert (block in pool._free) == (held[block] == 0)
    for group, by_hash in enumerate(pool._by_hash):
        for digest, block in by_hash.items():
            stored = pool._stored[block]
            assert stored is not None
            assert (stored[0], stored[1].hash) == (group, digest)
    assert sum(map(len, pool._by_hash)) == sum(stored is not None for stored in pool._stored)
    assert [request.rank for request in scheduler._running] == sorted(request.rank for request in scheduler._running)
    hosts = [block for request in scheduler._requests.values() for held in request.host_blocks for block in held]
    used = [block for block in hosts if block >= 0]
    assert len(used) == len(set(used))
    assert len(used) + len(scheduler._cache._host_free) == engine.info.num_host_blocks
    rows = [request.row for request in scheduler._running]
    assert len(set(rows)) == len(rows)
    assert len(rows) + len(scheduler._free_rows) == scheduler._config.max_num_seqs
