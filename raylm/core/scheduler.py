"""Who runs in the next step.

A pure state machine: schedule() makes a plan, update() takes a result, and any number of plans may be in flight
between the two. There is no prefill phase and no decode phase: each request has computed tokens that chase its known
tokens, and one token budget a step is shared out, to running requests first (Orca, OSDI 2022, for scheduling by
iteration; Sarathi-Serve, OSDI 2024, for chunked prefill beside decodes).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from raylm.config.engine import SchedulerConfig
from raylm.core.kv_cache import KVCacheManager
from raylm.core.queue import FCFSQueue
from raylm.core.request import Request, Status
from raylm.core.step import NewRow, StepPlan, StepResult, TokenDelta
from raylm.errors import ConfigError, Overloaded

_RETRY_AFTER_S = 1.0
_WATERMARK = 0.01
"""Share of the blocks kept free when a request is admitted, so that the running ones can grow for a while."""


class SchedulerStats(NamedTuple):
    """What runs and what waits, for metrics and autoscaling."""

    running: int
    waiting: int
    kv_usage: float
    num_preemptions: int


class _InFlight(NamedTuple):
    step: int
    sampling: list[Request]


class _Draft:
    """The plan being made: what is left of the budget, and the parallel lists of the plan."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.new_rows: list[NewRow] = []
        self.rows: list[int] = []
        self.num_tokens: list[int] = []
        self.new_blocks: list[list[int]] = []
        self.sampling: list[Request] = []

    def add(self, request: Request, num_tokens: int, new_blocks: list[int]) -> None:
        self.rows.append(request.row)
        self.num_tokens.append(num_tokens)
        self.new_blocks.append(new_blocks)
        self.budget -= num_tokens
        request.num_computed += num_tokens
        if request.num_computed == request.num_known:
            request.num_in_flight += 1
            self.sampling.append(request)


class Scheduler:
    """Admits, runs, preempts and finishes requests."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, *, max_model_len: int) -> None:
        if cache.capacity < max_model_len:
            raise ConfigError(
                f"the KV cache holds {cache.capacity} tokens, fewer than model.max_model_len {max_model_len}: "
                "lower max_model_len or give the cache more memory"
            )
        self._config = config
        self._cache = cache
        self._waiting = FCFSQueue()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[_InFlight] = deque()
        self._reserve = int(cache.capacity / cache.block_size * _WATERMARK)
        self._step = 0
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or bool(self._in_flight)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(len(self._running), len(self._waiting), self._cache.usage, self._num_preemptions)

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded when the queue is full."""
        if len(self._waiting) >= self._config.max_queued_requests:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting, at most {self._config.max_queued_requests} may",
                retry_after=_RETRY_AFTER_S,
            )
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is already in use")
        self._requests[request.id] = request
        self._waiting.add(request)

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request now; its blocks are free at once and what is still in flight for it is dropped."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._finish(request)
        return TokenDelta(request_id, [], "abort")

    def abort_all(self) -> list[TokenDelta]:
        """End every request."""
        deltas = [self.abort(request_id) for request_id in list(self._requests)]
        return [delta for delta in deltas if delta is not None]

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None when nothing can run now."""
        draft = _Draft(self._config.max_num_batched_tokens)
        if self._schedule_running(draft):
            self._admit(draft)
        if not draft.rows:
            return None
        self._step += 1
        self._in_flight.append(_InFlight(self._step, draft.sampling))
        return StepPlan(self._step, draft.new_rows, draft.rows, draft.num_tokens, draft.new_blocks)

    def update(self, result: StepResult) -> list[TokenDelta]:
        """Take the oldest step's result; tokens of requests that ended meanwhile are dropped."""
        flight = self._in_flight.popleft()
        if flight.step != result.step or len(flight.sampling) != len(result.token_ids):
            raise RuntimeError(f"result of step {result.step} does not answer step {flight.step}")
        deltas = []
        for request, token_id in zip(flight.sampling, result.token_ids, strict=True):
            if request.status is Status.FINISHED:
                continue
            request.num_in_flight -= 1
            request.token_ids.append(token_id)
            reason = request.finish_reason(token_id)
            if reason is not None:
                self._finish(request)
            deltas.append(TokenDelta(request.id, [token_id], reason))
        return deltas

    def _schedule_running(self, draft: _Draft) -> bool:
        """Give running requests their tokens, oldest first. False when one had to be preempted for it."""
        preempted = False
        index = 0
        while index < len(self._running) and draft.budget > 0:
            request = self._running[index]
            num_tokens = min(request.num_to_compute, draft.budget)
            if num_tokens == 0:
                index += 1
                continue
            added = self._cache.allocate(request, num_tokens)
            if added is None:
                # The newest gives way; it stands at or after `index`, so it is not part of this plan yet.
                self._preempt(self._running[-1])
                preempted = True
                continue
            draft.add(request, num_tokens, added)
            index += 1
        return not preempted

    def _admit(self, draft: _Draft) -> None:
        """Start waiting requests while rows, blocks and budget last, in the queue's order."""
        while self._free_rows and draft.budget > 0:
            request = self._waiting.first()
            # A preempted request waits for its tokens in flight: its next row must know them all.
            if request is None or request.num_in_flight:
                return
            num_tokens = min(request.num_to_compute, draft.budget)
            added = self._cache.allocate(request, num_tokens, reserve=self._reserve if self._running else 0)
            if added is None:
                return
            self._waiting.remove(request)
            request.status = Status.RUNNING
            request.row = self._free_rows.pop()
            self._running.append(request)
            draft.new_rows.append(NewRow(request.row, list(request.token_ids), 0, request.sampling))
            draft.add(request, num_tokens, added)

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks and row; it will compute its tokens again."""
        self._num_preemptions += 1
        self._release(request)
        request.num_computed = 0
        request.status = Status.WAITING
        self._waiting.put_back(request)

    def _finish(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._release(request)
        else:
            self._waiting.remove(request)
        request.status = Status.FINISHED
        del self._requests[request.id]

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self._cache.free(request)
        self._free_rows.append(request.row)
        request.row = -1
