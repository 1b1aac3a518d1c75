"""The loop: plan, submit, collect, update. Token in, token out."""

from __future__ import annotations

import random

from raylm.config.engine import EngineConfig
from raylm.core.kv_cache import KVCacheManager
from raylm.core.request import Request
from raylm.core.sampling import SamplingParams
from raylm.core.scheduler import Scheduler, SchedulerStats
from raylm.core.step import ModelInfo, TokenDelta
from raylm.errors import RequestRejected
from raylm.executor.base import Executor


class Engine:
    """One model: a scheduler, a KV cache and an executor. Not thread-safe: one caller drives it."""

    def __init__(self, config: EngineConfig, executor: Executor, *, plans_in_flight: int) -> None:
        """Start the executor and build the scheduler from what it reports. Raises ConfigError, EngineDeadError."""
        self._executor = executor
        self._window = plans_in_flight
        self._num_in_flight = 0
        self.info: ModelInfo = executor.start()
        cache = KVCacheManager(num_blocks=self.info.num_blocks, block_size=config.cache.block_size)
        self._scheduler = Scheduler(config.scheduler, cache, max_model_len=self.info.max_model_len)
        self._eos = frozenset(self.info.eos_token_ids)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue one sequence (params.n is the caller's business). Raises RequestRejected, Overloaded."""
        check_prompt(prompt_ids, params, max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        max_len = self.info.max_model_len
        if params.max_tokens is not None:
            max_len = min(max_len, len(prompt_ids) + params.max_tokens)
        seed = params.seed if params.seed is not None else random.getrandbits(63)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        self._scheduler.add(Request(request_id, prompt_ids, params, seed=seed, stop_ids=stop_ids, max_len=max_len))

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request; its KV blocks are free when this returns. None when it had ended already."""
        return self._scheduler.abort(request_id)

    def abort_all(self) -> list[TokenDelta]:
        """End every request."""
        return self._scheduler.abort_all()

    def step(self) -> list[TokenDelta]:
        """Fill the window of plans, wait for the oldest result and return what it gave. Raises EngineDeadError."""
        while self._num_in_flight < self._window:
            plan = self._scheduler.schedule()
            if plan is None:
                break
            self._executor.submit(plan)
            self._num_in_flight += 1
        if not self._num_in_flight:
            return []
        result = self._executor.result()
        self._num_in_flight -= 1
        return self._scheduler.update(result)

    def shutdown(self) -> None:
        """Stop the workers. May be called twice."""
        self._executor.shutdown()


def check_prompt(prompt_ids: list[int], params: SamplingParams, *, max_model_len: int, vocab_size: int) -> None:
    """Refuse what can never be served. Raises RequestRejected with the numbers."""
    if not prompt_ids:
        raise RequestRejected("the prompt is empty; it must have at least 1 token", param="prompt")
    if len(prompt_ids) >= max_model_len:
        raise RequestRejected(
            f"the prompt has {len(prompt_ids)} tokens, but this model takes {max_model_len} in all "
            "and at least one must be left for the output",
            param="prompt",
            code="context_length_exceeded",
        )
    if params.max_tokens is not None and len(prompt_ids) + params.max_tokens > max_model_len:
        raise RequestRejected(
            f"the prompt has {len(prompt_ids)} tokens and max_tokens is {params.max_tokens}, "
            f"together more than the {max_model_len} that this model takes",
            param="max_tokens",
            code="context_length_exceeded",
        )
    worst = max(prompt_ids) if min(prompt_ids) >= 0 else min(prompt_ids)
    if not 0 <= worst < vocab_size:
        raise RequestRejected(
            f"the prompt holds the token id {worst}; this model has 0 to {vocab_size - 1}", param="prompt"
        )
