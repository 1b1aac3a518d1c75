"""The scheduler's own time: no model, no device, a result as soon as it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import msgspec

from raylm.bench.report import PrefixResult, SchedulerResult
from raylm.config.resolve import ResolvedScheduler
from raylm.core.block_hash import HASHES
from raylm.core.kv_cache import KVCacheManager
from raylm.core.request import Request
from raylm.core.sampling import SamplingParams
from raylm.core.scheduler import Scheduler
from raylm.core.step import CacheLayout, StepPlan
from raylm.errors import ConfigError
from raylm.sim.cost import PRESETS
from raylm.sim.executor import SimulatedExecutor

ASKED_US_PER_STEP = {256: 250.0, 1024: 1000.0}
ASKED_US_ENCODE = {256: 100.0}
ASKED_MS_PREFIX = {32768: 3.0}
_BLOCK_SIZE = 16
_PROMPT_LEN = 128
_LOOKUPS = 31


def measure_steps(running: int, waiting: int, *, steps: int) -> SchedulerResult:
    """Median time of schedule and update while `running` requests decode and `waiting` more want a row.

    Two plans are in flight. Prompts differ in length, so that in each step one request in sixteen begins a block.
    Raises ConfigError.
    """
    if not 1 <= running <= 4096:
        raise ConfigError(f"--running must be from 1 to 4096, got {running}")
    decoding = _Decoding(running, waiting, steps=steps)
    times, encode_times = [], []
    encode = msgspec.msgpack.Encoder().encode
    for _ in range(steps):
        seconds, plan = decoding.step()
        times.append(seconds)
        encode_times.append(_seconds(partial(encode, plan)))
    return SchedulerResult(
        bench="scheduler",
        running=running,
        waiting=waiting,
        us_per_step=median(times) * 1e6,
        us_encode=median(encode_times) * 1e6,
        asked_us_per_step=ASKED_US_PER_STEP.get(running),
        asked_us_encode=ASKED_US_ENCODE.get(running),
    )


def measure_prefix(prompt_len: int) -> PrefixResult:
    """Median time to find a prompt in a prefix cache that holds all of it: by a new request, and by it again."""
    num_blocks = prompt_len // _BLOCK_SIZE + 2
    cache = KVCacheManager(CacheLayout(_BLOCK_SIZE, [0]), num_blocks=num_blocks, hash_of=HASHES["xxhash"])
    prompt_ids = list(range(prompt_len))
    first = _request(0, prompt_ids, max_tokens=1)
    cache.allocate(first, prompt_len)
    first.num_computed = prompt_len
    cache.store_full(first)
    cache.free(first)
    cold: list[float] = []
    warm: list[float] = []
    for index in range(_LOOKUPS):
        request = _request(1 + index, prompt_ids, max_tokens=1)
        for times in (cold, warm):
            times.append(_seconds(partial(cache.attach_prefix, request)))
            cache.free(request)
            request.num_computed = 0
    return PrefixResult("prefix", prompt_len, median(cold) * 1e3, median(warm) * 1e3, ASKED_MS_PREFIX.get(prompt_len))


class _Decoding:
    """A scheduler whose rows all decode, with one plan always in flight."""

    def __init__(self, running: int, waiting: int, *, steps: int) -> None:
        # While some prefill others decode already, and none may end before the last step.
        max_len = _PROMPT_LEN + _BLOCK_SIZE + running + steps + 64
        num_blocks = 2 + (running + 1) * (max_len // _BLOCK_SIZE + 2)
        num_blocks += num_blocks // 50
        config = ResolvedScheduler(
            max_num_seqs=running,
            max_num_batched_tokens=max(running, 8192),
            max_queued_requests=max(1, running, waiting),
        )
        cache = KVCacheManager(CacheLayout(_BLOCK_SIZE, [0]), num_blocks=num_blocks, hash_of=HASHES["xxhash"])
        self._scheduler = Scheduler(config, cache, max_model_len=max_len)
        self._worker = SimulatedExecutor(
            PRESETS["h200-8b"], num_blocks=num_blocks, block_size=_BLOCK_SIZE, max_model_len=max_len
        )
        for index in range(running):
            self._add(index, max_len)
        self._submit(self._plan())
        decoding = 0
        while decoding < running:
            _, plan = self.step()
            decoding = len(plan.rows) if plan.total_tokens == len(plan.rows) else 0
        for index in range(running, running + waiting):
            self._add(index, max_len)

    def step(self) -> tuple[float, StepPlan]:
        """Plan a step and take the result of the one before: the seconds that the scheduler took, and the plan."""
        start = perf_counter()
        plan = self._scheduler.schedule(self._worker.now)
        seconds = perf_counter() - start
        assert plan is not None
        self._submit(plan)
        result = self._worker.result()
        return seconds + _seconds(lambda: self._scheduler.update(result, self._worker.now)), plan

    def _plan(self) -> StepPlan:
        plan = self._scheduler.schedule(self._worker.now)
        assert plan is not None
        return plan

    def _submit(self, plan: StepPlan) -> None:
        self._worker.submit(plan)

    def _add(self, index: int, max_len: int) -> None:
        prompt_ids = [1 + index] * (_PROMPT_LEN + index % _BLOCK_SIZE)
        request = _request(index, prompt_ids, max_tokens=max_len - len(prompt_ids))
        self._scheduler.add([request], self._worker.now)


def _request(index: int, prompt_ids: list[int], *, max_tokens: int) -> Request:
    request = Request(
        str(index),
        prompt_ids,
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        seed=0,
        stop_ids=frozenset(),
        max_len=len(prompt_ids) + max_tokens,
    )
    request.block_ids = [[]]
    return request


def _seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
