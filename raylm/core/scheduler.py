"""Who runs in the next step.

A pure state machine: schedule() makes a plan, update() takes a result, and any number of plans may be in flight
between the two; time is an argument. There is no prefill phase and no decode phase: each request has computed tokens
that chase its known tokens, and one token budget a step is shared out, to running requests first (Orca, OSDI 2022, for
scheduling by iteration; Sarathi-Serve, OSDI 2024, for chunked prefill beside decodes).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter
from typing import NamedTuple

from raylm.config.resolve import ResolvedScheduler
from raylm.core.admission import Admission, too_late
from raylm.core.beam import Beams, TextEnds
from raylm.core.drafting import NOTHING_DRAFTED, Drafter, Proposal
from raylm.core.kv_cache import KVCacheManager
from raylm.core.load import Load
from raylm.core.newcomers import Newcomers
from raylm.core.pacing import PlanDelay, PrefillBudget, PrefillPacer, StepTimer
from raylm.core.plan import PlanBuilder
from raylm.core.policies import make_policy
from raylm.core.request import Request, Status
from raylm.core.row_pool import RowPool
from raylm.core.settler import Settler
from raylm.core.step import Sampled, StepPlan, TokenDelta
from raylm.core.turns import Turn, take_turn
from raylm.errors import ConfigError

_WATERMARK = 0.01
"""Share of the blocks kept free when a request is admitted, so that the running ones can grow for a while."""
_rank = attrgetter("rank")


class _InFlight(NamedTuple):
    step: int
    num_tokens: int
    builder: PlanBuilder


class Scheduler:
    """Admits, runs, preempts and finishes requests.

    `running` is kept in the policy's order; the last one gives way when blocks run out. A plan is made in that order
    too, so that whoever gives way is not part of it yet.
    """

    def __init__(
        self,
        config: ResolvedScheduler,
        cache: KVCacheManager,
        *,
        max_model_len: int,
        num_stages: int = 1,
        drafter: Drafter | None = None,
    ) -> None:
        """With `num_stages` pipeline stages running requests take turns, so that each stage has a plan to work on.
        `drafter` switches speculative decoding on. Raises ConfigError when the cache is too small."""
        needed = cache.layout.blocks_for(max_model_len, chunk=config.max_num_batched_tokens)
        if needed > cache.num_usable:
            raise ConfigError(
                f"the KV cache has {cache.num_usable} blocks of {cache.block_size} tokens, but one request of "
                f"model.max_model_len {max_model_len} needs {needed}: "
                "lower max_model_len or give the cache more memory"
            )
        self._config = config
        self._cache = cache
        self._policy = make_policy(config)
        self._admission = Admission(config)
        self._pacer = PrefillPacer(config)
        self._num_stages = num_stages
        self._drafter = drafter
        self._timer = StepTimer()
        self._delay = PlanDelay()
        self._beams = Beams(self)
        self._settler = Settler(self._policy, drafter)
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._held: set[str] = set()
        """Requests that wait for release()."""
        self._forked: dict[Request, None] = {}
        self._to_fork: list[Request] = []
        self._swapped_out: dict[int, int] = {}
        """The device block that the next plan copies into each host block: there may be no plan to do it at once. When
        a request ends before that, the copies of the next one that gets its host blocks take the place of its own."""
        self._rows = RowPool(config.max_num_seqs)
        self._in_flight: deque[_InFlight] = deque()
        self._reserve = int(cache.num_usable * _WATERMARK)
        self._stuck: tuple[str, int, bool] | None = None
        self._newcomers = Newcomers()
        self._num_orders = 0
        self._step = 0
        self._now = 0.0
        """When the plan in hand is made."""
        self._num_preemptions = 0
        self._num_swaps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or bool(self._in_flight)

    def stats(self) -> Load:
        return Load(
            len(self._running),
            len(self._requests) - len(self._running),
            self._cache.usage,
            self._num_preemptions,
            self._num_swaps,
            self._cache.num_queries,
            self._cache.num_hits,
            self._newcomers.num_tokens,
            self._drafter.counters if self._drafter is not None else NOTHING_DRAFTED,
            queue_s=self._admission.queue_s(len(self._running), self._newcomers.num, self._newcomers.num_tokens),
        )

    def add(
        self, requests: list[Request], now: float, *, text_ends: TextEnds | None = None, held: bool = False
    ) -> None:
        """Queue the sequences of one prompt: samples that share it, or the results of one beam search, whose stop
        strings `text_ends` looks for. If `held`, they wait for release(), whatever the queue is.

        Raises Overloaded when the queue is full or their time is too short.
        """
        for request in requests:
            self._check_new(request)
        first, *others = requests
        self._admission.check(
            first,
            num_cached=self._cache.num_cached(first) if first.options.deadline_s else 0,
            num_running=len(self._running),
            num_waiting=self._newcomers.num,
            waiting_tokens=self._newcomers.num_tokens,
            now=now,
        )
        if first.params.beam_width:
            self._beams.begin(first, [request.id for request in requests], text_ends)
            others = []
        self.enlist(first)
        if held:
            self._hold(first)
        else:
            self._policy.add(first)
        self._newcomers.add(first)
        for request in others:
            self.enlist(request)
            request.num_charged = request.num_prompt
            request.status = Status.PARKED
        first.forks = others

    def announce(self, num_sequences: int, num_tokens: int) -> None:
        """So many sequences are still to be added, whose prompts have so many tokens together."""
        self._newcomers.announce(num_sequences, num_tokens)

    def resume(self, request: Request, *, held: bool = False) -> None:
        """Queue a sequence that another engine began, before newcomers: it has had its turn there, and takes no place
        of theirs."""
        self._check_new(request)
        self.enlist(request)
        request.num_charged = request.num_prompt
        if held:
            self._hold(request)
        else:
            self.requeue(request)

    def release(self, request_id: str) -> None:
        """The sequences that were added with this first id and held are in the queue from here on. Nothing where they
        have ended meanwhile."""
        if request_id not in self._held:
            return
        self._held.discard(request_id)
        request = self._requests[request_id]
        if request.is_new:
            request.status = Status.WAITING
            self._policy.add(request)
        else:
            self.requeue(request)

    def _check_new(self, request: Request) -> None:
        if request.id in self._requests or request.id in self._beams:
            raise ValueError(f"request id {request.id!r} is already in use")

    def _hold(self, request: Request) -> None:
        request.status = Status.PARKED
        self._held.add(request.id)

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request now; its blocks are free at once and what is still in flight for it is dropped.

        Any id of a beam search ends it all.
        """
        if request_id in self._beams:
            self._beams.end(request_id)
        elif (request := self._requests.get(request_id)) is not None:
            self.finish(request)
        else:
            return None
        return TokenDelta(request_id, [], "abort")

    def abort_all(self) -> list[TokenDelta]:
        """End every request."""
        ids = [*self._beams.ids, *(id for id, request in self._requests.items() if request.search is None)]
        deltas = [TokenDelta(request_id, [], "abort") for request_id in ids]
        for request in list(self._requests.values()):
            if request.status is not Status.FINISHED:
                self.abort(request.search.ids[0] if request.search else request.id)
        return deltas

    def expire(self, now: float) -> list[TokenDelta]:
        """End the requests whose time is up."""
        deltas = []
        for request in self._admission.due(now):
            if request.status is Status.FINISHED:
                continue  # With another beam of its search.
            message = too_late(request, now)
            if request.search is not None:
                deltas += [TokenDelta(id, [], "deadline", message) for id in self._beams.end(request.search.ids[0])]
            else:
                self.finish(request)
                deltas.append(TokenDelta(request.id, [], "deadline", message))
        return deltas

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or None when nothing can run now."""
        self._now = self._cache.ages.now = now
        self._fork_off()
        bounds = [(request.row, request.num_known) for request in self._settler.rejected if request.row >= 0]
        budget = self._prefill_budget()
        builder = PlanBuilder(self._config.max_num_batched_tokens, budget, self._swapped_out)
        alone = self._prompts_alone(budget)
        if self._schedule_running(Turn.PROMPTS if alone else Turn.EVERYBODY, builder):
            self._admit(builder)
        if not builder.rows and (alone or self._num_stages > 1):
            # With one stage that is everybody.
            self._schedule_running(Turn.EARLY, builder)
        if not builder.rows and not self._in_flight and self._unblock(builder):
            self._admit(builder)
        if not builder.rows:
            return None
        self._store_some()
        self._swapped_out = {}
        self._settler.rejected.clear()
        self._step += 1
        plan = builder.plan(self._step, self._beams.take_chosen(), bounds)
        self._in_flight.append(_InFlight(self._step, plan.total_tokens, builder))
        self._timer.submitted(now)
        return plan

    def plan_at(self) -> float:
        """When to plan the next step: as late as the device allows, so that requests that arrive before are in it. Long
        past where waiting requests fill that step already, or no step is under way."""
        num_new = self._newcomers.num
        preempted = len(self._policy) > num_new
        if not self._in_flight or preempted or self._rows.num_free <= num_new:
            return float("-inf")
        budget = self._prefill_budget()
        if self._newcomers.tokens_of(budget.of_one) >= budget.tokens:
            return float("-inf")
        return self._delay.until(self._in_flight[0].num_tokens, self._timer.began)

    def update(self, result: Sampled, now: float) -> list[TokenDelta]:
        """Take the oldest step's result; tokens of requests that ended meanwhile are dropped."""
        step, num_tokens, builder = self._in_flight.popleft()
        num_sampled = sum(result.counts) if result.counts else len(builder.sampling)
        if step != result.step or num_sampled != len(result.token_ids):
            raise RuntimeError(f"result of step {result.step} does not answer step {step}")
        seconds = self._timer.finished(now)
        self._pacer.observe(num_tokens, seconds)
        self._delay.observe(num_tokens, seconds)
        self._admission.observe(builder.num_prefill, num_sampled, seconds, self._newcomers.num)
        if self._drafter is not None and len(builder.sampling) == len(builder.rows) and not builder.num_prefill:
            self._drafter.observe(len(builder.rows), num_tokens, num_sampled, seconds)
        deltas = self._settler.settle(builder, result, now)
        for delta in deltas:
            if delta.finish_reason is not None:
                request = self._requests[delta.request_id]
                self._admission.finished(request)
                self.finish(request)
        if builder.reporting:
            self._settler.charge(builder.reporting)
            deltas += self._beams.take(builder.reporting, result.candidates, now)
        return deltas

    def check(self) -> None:
        """Assert what is true between two calls, of requests, rows and blocks. For tests and for debugging."""
        self._cache.check(self._requests.values())
        for request in self._running:
            assert request.num_computed <= min(request.num_slots, request.num_known), request.id
        ranks = [request.rank for request in self._running]
        assert ranks == sorted(ranks), "running requests are in the policy's order"
        self._rows.check(self._running)

    def _schedule_running(self, whose: Turn, builder: PlanBuilder) -> bool:
        """Give running requests whose turn it is their tokens. False when one had to be preempted for it."""
        turn = take_turn(self._running, self._step + 1, self._num_stages, whose)
        add_row, add_sampling = builder.rows.append, builder.sampling.append
        proposals = self._proposals(turn)
        tokens, of_one = builder.for_prompts
        for_prompts = min(self._prompt_tokens(turn, of_one), tokens) if proposals else 0
        if for_prompts and self._config.target_itl_ms is not None:
            # The pacer says how many tokens a step may take beside prompts, and knows of no drafts.
            proposals = {}
        preempted = False
        for request in turn:
            if proposals and request in proposals and self._verify(request, proposals[request], builder, for_prompts):
                continue
            computed = request.num_computed
            if request.num_known - computed == 1 and (computed < request.horizon or self._grow(request, builder)):
                request.plan(1)
                add_row(request.row)
                add_sampling(request)
            elif not self._continue(request, builder):
                preempted = True
        return not preempted

    def _grow(self, request: Request, builder: PlanBuilder) -> bool:
        """Give a decoding request that wants another token its next block. False where allocate() must do it, and for a
        request that has given way (its horizon is 0) or has all its tokens on their way."""
        if not 0 < request.horizon == request.num_slots < request.max_len - 1:
            return False
        added = self._cache.append_block(request)
        if added is None:
            return False
        builder.new_blocks.append(added)
        request.set_horizon()
        return True

    def _proposals(self, turn: list[Request]) -> dict[Request, Proposal]:
        """What decoding requests of this turn are to verify."""
        if self._drafter is None or not self._drafter.is_on(len(turn)):
            return {}
        return self._drafter.plan([request for request in turn if request.horizon and request.num_to_compute == 1])

    def _prompt_tokens(self, turn: list[Request], of_one: int) -> int:
        """Known tokens beside each row's next one that a step could compute, at most `of_one` of a request: of prompts
        that run, and of those that could begin."""
        running = sum(min(request.num_to_compute - 1, of_one) for request in turn if request.num_to_compute > 1)
        first = self._policy.first() if self._rows.num_free else None
        waiting = 0 if first is None else max(min(first.num_to_compute, of_one), self._newcomers.tokens_of(of_one))
        return running + waiting

    def _verify(self, request: Request, proposal: Proposal, builder: PlanBuilder, for_prompts: int) -> bool:
        """Let a decoding request verify drafts, where there is room for any beside the step's tokens of prompts."""
        if request.row < 0:
            return False  # It has given way to one before it in its turn.
        # Every running request after this one can still decode.
        room = builder.left - (len(self._running) - len(builder.rows)) - max(for_prompts - builder.num_prefill, 0)
        proposal = proposal.first(min(room, request.max_len - request.num_known - 1))
        if proposal.num_drafts <= 0:
            return False
        num_columns = len(request.block_ids[0])
        copies = self._cache.allocate(request, 1 + proposal.num_drafts)
        if copies is None:
            return False
        builder.add_blocks(self._cache.blocks_from(request, num_columns))
        builder.copy(copies)
        builder.verify(request, proposal)
        request.set_horizon()
        return True

    def _continue(self, request: Request, builder: PlanBuilder) -> bool:
        """Let a running request compute what it can. False when one had to be preempted for it."""
        if request.row < 0:
            return True  # It has given way to one before it in its turn.
        num_tokens = request.num_to_compute
        if num_tokens > 1:
            # Every running request after this one can still decode.
            reserved = len(self._running) - len(builder.rows) - 1
            num_tokens = builder.room(num_tokens, reserved=reserved)
        if num_tokens <= 0:
            return True
        num_columns = len(request.block_ids[0])
        gave_way = False
        while (copies := self._cache.allocate(request, num_tokens)) is None:
            if self._strip_forks():
                continue
            gave_way = True
            victim = self._running[-1]
            if victim is request and self._park_idle_beams(builder):
                continue
            self._preempt(victim, builder)
            if victim is request:
                return False
        builder.add_blocks(self._cache.blocks_from(request, num_columns))
        builder.copy(copies)
        self._compute(request, num_tokens, builder)
        return not gave_way

    def _admit(self, builder: PlanBuilder) -> None:
        """Start waiting requests while rows, blocks and budget last, in the policy's order."""
        if not self._rows.num_free and len(self._policy):
            self._park_idle_beams(builder)
        while self._rows.num_free:
            request = self._policy.first()
            # A preempted request waits for its tokens in flight: its next row must know them all.
            if request is None or request.num_in_flight or not self._start(request, builder):
                return

    def _start(self, request: Request, builder: PlanBuilder) -> bool:
        """Give a waiting request a row, blocks and its first tokens; False when it must wait on."""
        state = (request.id, self._cache.num_free, bool(self._running))
        if state == self._stuck:
            return False
        # Before the look for a prefix, which is the dearer: most steps have no room for one prompt more.
        if builder.room(request.num_to_compute, reserved=0) <= 0:
            return False
        is_fresh = request.num_computed == 0
        if is_fresh and request.params.prompt_logprobs is None:
            self._cache.attach_prefix(request)
        num_tokens = builder.room(request.num_to_compute, reserved=0)
        if not self._make_room(request, num_tokens, builder):
            if is_fresh:
                self._cache.free(request)
                request.begin_at(0)
            self._stuck = state
            return False
        self._policy.remove(request)
        self._forked.pop(request, None)
        request.status = Status.RUNNING
        self._rows.take(request)
        request.last_turn = self._step + 1
        request.begin(self._now)
        request.rank = self._policy.rank(request)
        insort(self._running, request, key=_rank)
        if request.is_new:
            self._newcomers.remove(request)
            self._admission.started(request)
            self._cache.count_hits(request)
            request.num_cached = request.num_charged = request.num_computed
        if self._drafter is not None and request.search is None:
            self._drafter.begin(request)
        builder.add_row(request)
        builder.add_blocks(self._cache.blocks_from(request, 0))
        self._compute(request, num_tokens, builder)
        return True

    def _make_room(self, request: Request, num_tokens: int, builder: PlanBuilder) -> bool:
        """Blocks for a waiting request's first step, from the host where they went there."""
        reserve = self._reserve if self._running else 0
        if request.host_blocks:
            pairs = self._cache.swap_in(request, num_tokens, reserve=reserve)
            builder.swap_in(pairs or [])
            return pairs is not None
        copies = self._cache.allocate(request, num_tokens, reserve=reserve)
        builder.copy(copies or [])
        return copies is not None

    def _compute(self, request: Request, num_tokens: int, builder: PlanBuilder) -> None:
        """Put the request's next tokens into the plan; from here on others can share the blocks that a prompt fills."""
        builder.add(request, num_tokens)
        request.set_horizon()
        if request.num_computed > request.num_prompt and not request.forks:
            return
        self._cache.store_full(request)
        done = min(request.num_computed, request.num_prompt)
        if done > request.num_charged:
            self._policy.served(request, done - request.num_charged, 0)
            request.num_charged = done
        if request.forks and request.num_computed >= request.num_prompt:
            self._to_fork.append(request)

    def _store_some(self) -> None:
        """Let others find the blocks that decodes have filled. With blocks of 16 tokens each step hashes those of every
        sixteenth row: rows that began together fill their blocks in the same step, which would be long."""
        for request in self._rows.every(self._cache.block_size, self._step):
            self._cache.store_full(request)

    def _fork_off(self) -> None:
        """Prompts that the last plan completed: their other sequences share them now, and compute the last token again
        to sample their own first token from it. (A plan copies blocks before it fills any.)"""
        for request in reversed(self._to_fork):
            forks, request.forks = request.forks, []
            for fork in reversed(forks):
                if fork.status is Status.PARKED:
                    self.fork(request, fork, request.num_prompt - 1)
                    self.requeue(fork)
        self._to_fork.clear()

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Let a waiting child hold the parent's first `num_tokens` tokens, as long as nobody needs the blocks more."""
        self._cache.fork(parent, child, num_tokens)
        if parent.started is not None:
            child.begin(parent.started)
        self._forked[child] = None

    def enlist(self, request: Request) -> None:
        """Take a new request in; it is in no queue yet."""
        self._num_orders += 1
        request.order = self._num_orders
        request.block_ids = [[] for _ in self._cache.layout.windows]
        self._requests[request.id] = request
        self._admission.watch(request)

    def requeue(self, request: Request) -> None:
        """Queue a request that was preempted or parked, before newcomers."""
        request.status = Status.WAITING
        self._policy.put_back(request)

    def finish(self, request: Request) -> None:
        """End a request; its blocks are free, and still found by requests of the same prefix."""
        if request.status is Status.RUNNING:
            self._cache.store_full(request)
            del self._running[bisect_left(self._running, request.rank, key=_rank)]
            self._free_row(request)
        elif request.status is Status.WAITING:
            self._policy.remove(request)
        if request.is_new:
            self._newcomers.remove(request)
        self._cache.free(request)
        self._forked.pop(request, None)
        request.status = Status.FINISHED
        self._held.discard(request.id)
        del self._requests[request.id]
        forks, request.forks = request.forks, []
        for fork in reversed(forks):
            if fork.status is Status.PARKED:
                self.requeue(fork)

    def _preempt(self, request: Request, builder: PlanBuilder) -> None:
        """Take a running request's blocks and row, to the host where that is cheaper than to compute them again."""
        self._num_preemptions += 1
        del self._running[bisect_left(self._running, request.rank, key=_rank)]
        request.horizon = 0
        self._cache.store_full(request)
        pairs = self._cache.swap_out(request)
        if pairs is None:
            self._cache.free(request)
            request.begin_at(0)
        else:
            builder.swap_out(pairs)
            self._num_swaps += 1
        self._free_row(request)
        if request.is_reporting or self._beams.has_reported(request):
            request.status = Status.PARKED
        else:
            self.requeue(request)

    def _free_row(self, request: Request) -> None:
        if self._drafter is not None and request.search is None:
            self._drafter.end(request)
        self._beams.forget_chosen(request.row)
        self._rows.give_back(request)

    def _strip_forks(self) -> bool:
        """Take the blocks that waiting forks hold, before anything that runs gives way. False when there are none."""
        for request in self._forked:
            self._cache.free(request)
            request.begin_at(0)
        stripped = bool(self._forked)
        self._forked.clear()
        return stripped

    def _unblock(self, builder: PlanBuilder) -> bool:
        """Nothing runs and the first in the queue cannot start: whatever only holds rows and blocks gives them up."""
        if not len(self._policy):
            return False
        self._stuck = None
        stripped = self._strip_forks()
        return self._park_idle_beams(builder) or stripped

    def _park_idle_beams(self, builder: PlanBuilder) -> bool:
        """Take rows and blocks of the beams that only wait for others. False when there are none."""
        idle = [request for request in self._running if self._beams.has_reported(request)]
        for request in idle:
            self._preempt(request, builder)
        return bool(idle)

    def _prefill_budget(self) -> PrefillBudget:
        """What prompts get of the next step. Requests whose last token is in flight do not count as decodes. Beams with
        no token to compute do: they wait for the other beams of their search."""
        # By fields: a property of each of a thousand requests takes three times as long.
        to_compute = [one.num_known - one.num_computed for one in self._running if one.num_known < one.max_len]
        num_decodes = to_compute.count(1) + to_compute.count(0)
        return self._pacer.budget(
            num_decodes=-(-num_decodes // self._num_stages),
            num_prompts=len(to_compute) - num_decodes,
            num_waiting=min(len(self._policy), self._rows.num_free),
        )

    def _prompts_alone(self, budget: PrefillBudget) -> bool:
        """Whether the next step computes prompts alone, which fill it, and running requests wait. The request that
        begins last says how many decode steps follow the prompts. A decode costs less there than in a full step, so
        none is made before, unless some request waits for another one to end."""
        new, cache = self._newcomers, self._cache
        num_waiting = len(self._requests) - len(self._running) + new.num_to_come
        return (
            self._pacer.fills_step(new.tokens_of(budget.of_one))
            # Nobody is held, nor was preempted: those who wait are newcomers that can begin.
            and len(self._policy) == new.num
            and num_waiting <= self._rows.num_free
            and new.num_tokens + new.tokens_to_come <= cache.num_free // len(cache.layout.windows) * cache.block_size
        )
