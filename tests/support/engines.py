"""Engines on the fake worker, and what is true of their state at any time."""

from __future__ import annotations

from collections import Counter

from raylm.config.engine import CacheConfig, ModelConfig, ParallelConfig
from raylm.config.resolve import ResolvedEngine, ResolvedRuntime, ResolvedScheduler
from raylm.core.drafting import Drafter
from raylm.core.step import Logprobs, Waited, join_logprobs
from raylm.engine.engine import Engine
from tests.support.fakes import FakeExecutor


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
    profile_folder: str | None = None,
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
        runtime=ResolvedRuntime(step_timeout_s=60.0, profile_folder=profile_folder),
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
        self.waited: dict[str, Waited] = {}

    def take(self, deltas) -> None:
        for delta in deltas:
            assert delta.request_id not in self.reasons, "a token after the end"
            if delta.waited is not None:
                assert not self.tokens.get(delta.request_id), "the wait is told once, with the first token"
                self.waited[delta.request_id] = delta.waited
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
    """Every block and every row is free or held as often as requests hold it; what can be found is where it should
    be."""
    engine._scheduler.check()
