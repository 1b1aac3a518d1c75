"""The loop: plan, submit, collect, update. Token in, token out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from raylm.config.resolve import ResolvedEngine
from raylm.core.beam import TextEnds
from raylm.core.block_hash import HASHES, PrefixForm
from raylm.core.control import Control, ResetCache
from raylm.core.drafting import Drafter
from raylm.core.events import EventBatch, EventLog, EventSnapshot, StoredTokens
from raylm.core.kv_cache import KVCacheManager, SwapCosts
from raylm.core.load import Load
from raylm.core.measures import EngineMeasures
from raylm.core.options import RequestOptions
from raylm.core.request import Begun, Request
from raylm.core.sampling import MAX_SEED, SamplingParams, draw_seed
from raylm.core.scheduler import Scheduler
from raylm.core.speculation import make_drafter
from raylm.core.step import ModelInfo, TokenDelta
from raylm.engine.checks import check_begun, check_params, check_prompt
from raylm.engine.grammars import HeldForGrammars
from raylm.engine.step_meter import StepMeter
from raylm.engine.stop_strings import StopStrings
from raylm.errors import EngineDeadError, RequestRejected
from raylm.executor.base import Executor

_DEFAULT_OPTIONS = RequestOptions()


class _Wanted(NamedTuple):
    """What the sequences of one prompt have in common."""

    prompt_ids: list[int]
    params: SamplingParams
    options: RequestOptions
    seed: int
    stop_ids: frozenset[int]
    max_len: int
    arrived: float

    def request(self, id: str, begun: Begun) -> Request:
        return Request(
            id,
            self.prompt_ids,
            self.params,
            seed=_wrapped(self.seed + begun.number),
            stop_ids=self.stop_ids,
            max_len=self.max_len,
            options=self.options,
            arrived=self.arrived,
            generated=begun.token_ids,
        )


class Engine:
    """One model: a scheduler, a KV cache and an executor. Not thread-safe: one caller drives it."""

    def __init__(
        self,
        config: ResolvedEngine,
        executor: Executor,
        *,
        plans_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
        text_ends: Callable[[SamplingParams], TextEnds] | None = None,
    ) -> None:
        """Start the executor and build the scheduler from what it reports. `drafter` takes the place of the one that
        config.speculation asks for; `text_ends` that of the model's tokenizer, for the stop strings of beam searches.
        Raises ConfigError, EngineDeadError."""
        self._executor = executor
        self._window = plans_in_flight
        # Each stage of a pipeline needs a plan. Without graphs the host takes too long to launch a step.
        self._delays = plans_in_flight == 2 and config.parallel.pipeline == 1 and config.runtime.cuda_graphs
        self._clock = clock
        self._num_in_flight = 0
        self._num_generated = 0
        self.meter = StepMeter()
        self._failure: str | None = None
        self.info: ModelInfo = executor.start()
        self._events = EventLog(with_tokens=config.kv_events.endpoint is not None) if config.cache.events else None
        self._cache = make_cache(config, self.info, self._events)
        self._prefix_form = _prefix_form(config, self.info)
        self._got_on = clock()
        self._scheduler = Scheduler(
            config.scheduler,
            self._cache,
            max_model_len=self.info.max_model_len,
            num_stages=config.parallel.pipeline,
            drafter=drafter or make_drafter(config.speculation),
        )
        self.limits = config.scheduler
        """What one step may hold and how many requests may wait."""
        self._generation = config.generation
        self._profile_folder = config.runtime.profile_folder
        self._eos = frozenset(self.info.eos_token_ids)
        self._grammars = HeldForGrammars(executor.prepare)
        self._text_ends = text_ends or StopStrings(config.model.reference).of

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stalled_s(self) -> float:
        """How long the engine has not got on: since it last finished a step, or had nothing to do but to wait for
        requests or their grammars. Asked by any thread."""
        return self._clock() - self._got_on

    @property
    def prefix_form(self) -> PrefixForm | None:
        """How the blocks are named that its events tell of; None where it tells of none."""
        return self._prefix_form

    def stats(self) -> Load:
        return self._scheduler.stats()._replace(num_generated=self._num_generated)

    def measures(self) -> EngineMeasures:
        """May be called from other threads than the one that drives the engine."""
        return EngineMeasures(self.meter.seconds, self.meter.tokens.buckets, self._cache.ages.measures)

    def add(
        self,
        ids: Sequence[str],
        prompt_ids: list[int],
        params: SamplingParams,
        options: RequestOptions = _DEFAULT_OPTIONS,
    ) -> None:
        """Queue one sequence an id, all of one prompt, whose blocks they share; the i-th samples with seed + i.

        With params.beam_width the ids get the best sequences of one search, best first. Raises RequestRejected,
        Overloaded.
        """
        self.check_request(prompt_ids, params)
        self.add_checked(ids, prompt_ids, params, options)

    def add_checked(
        self,
        ids: Sequence[str],
        prompt_ids: list[int],
        params: SamplingParams,
        options: RequestOptions = _DEFAULT_OPTIONS,
    ) -> None:
        """As add, for a request that check_request has let pass. Raises Overloaded, and RequestRejected for a beam
        search with stop strings of a model whose text cannot be searched."""
        wanted = self._wanted(prompt_ids, params, options)
        requests = [wanted.request(id, Begun(index, [])) for index, id in enumerate(ids)]
        text_ends = self._text_ends(params) if params.beam_width and params.stop else None
        preparing = self._grammars.begin(params)
        self._scheduler.add(requests, wanted.arrived, text_ends=text_ends, held=preparing is not None)
        if preparing is not None:
            self._grammars.hold(requests[0].id, preparing)

    def announce(self, num_sequences: int, num_tokens: int) -> None:
        """Say how many sequences the caller will add when there is room in the queue, and how many tokens their prompts
        have together: what is best for the next step may depend on what comes."""
        self._scheduler.announce(num_sequences, num_tokens)

    def resume(
        self,
        ids: Sequence[str],
        prompt_ids: list[int],
        params: SamplingParams,
        options: RequestOptions,
        begun: Sequence[Begun],
    ) -> None:
        """Go on with sequences of one prompt that another engine began, one an id: what they get is what they would
        have got there. Raises RequestRejected."""
        self.check_request(prompt_ids, params)
        wanted = self._wanted(prompt_ids, params, options)
        check_begun(ids, begun, params, room=wanted.max_len - len(prompt_ids), vocab_size=self.info.vocab_size)
        for id, each in zip(ids, begun, strict=True):
            request, preparing = wanted.request(id, each), self._grammars.begin(params)
            self._scheduler.resume(request, held=preparing is not None)
            if preparing is not None:
                self._grammars.hold(id, preparing)

    def _wanted(self, prompt_ids: list[int], params: SamplingParams, options: RequestOptions) -> _Wanted:
        max_len = self.info.max_model_len
        if params.max_tokens is not None:
            # With max_tokens 0 the step that computes the prompt samples a token too, which nobody gets.
            max_len = min(max_len, len(prompt_ids) + max(params.max_tokens, 1))
        # Requests of a server have a seed from where they entered; this one is for callers that never repeat theirs.
        seed = params.seed if params.seed is not None else draw_seed()
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        # No step samples a token beyond the vocabulary, nor need one be kept from it.
        stop_ids = frozenset(token for token in ends if token < self.info.vocab_size)
        return _Wanted(prompt_ids, params, options, seed, stop_ids, max_len, self._clock())

    def check_request(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Refuse what `add` would refuse of any request, however busy the engine is. Raises RequestRejected."""
        check_prompt(prompt_ids, params, max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        check_params(params, self._generation, vocab_size=self.info.vocab_size, eos=self._eos)

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a sequence, or the beam search that it belongs to; its KV blocks are free when this returns.

        None when it had ended already.
        """
        return self._scheduler.abort(request_id)

    def abort_all(self) -> list[TokenDelta]:
        """End every request."""
        return self._scheduler.abort_all()

    def step(self) -> list[TokenDelta]:
        """Fill the window of plans, wait for the oldest result and return what it gave.

        Raises EngineDeadError, and whatever a step raises; after that the engine can only be shut down.
        """
        if self._failure is not None:
            raise EngineDeadError(f"a step failed: {self._failure}")
        try:
            return self._step()
        except Exception as error:
            # The scheduler counts on a step that never was, or never ended.
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _step(self) -> list[TokenDelta]:
        for request_id in self._grammars.take_ready():
            self._scheduler.release(request_id)
        expired = self._scheduler.expire(self._clock())
        clock, meter = self._clock, self.meter
        while self._num_in_flight < self._window:
            begin = clock()
            plan = self._scheduler.schedule(begin)
            if plan is None:
                break
            planned = clock()
            self._executor.submit(plan)
            self._num_in_flight += 1
            meter.schedule.observe(planned - begin)
            meter.submit.observe(clock() - planned)
            meter.tokens.observe(plan.total_tokens)
        if not self._num_in_flight:
            if not self.has_work or self._grammars.wait():
                self._got_on = self._clock()
            return expired
        begin = clock()
        result = self._executor.result()
        self._num_in_flight -= 1
        came = self._got_on = clock()
        deltas = self._scheduler.update(result, came)
        self._num_generated += sum(len(delta.token_ids) for delta in deltas)
        meter.wait.observe(came - begin)
        meter.update.observe(clock() - came)
        return expired + deltas

    @property
    def delay_s(self) -> float:
        """How long the next call of `step` can wait for requests that are still to come while the device has work: 0 or
        less where it should be called now."""
        if not self._delays or self._num_in_flight != 1 or self._executor.done:
            return 0.0
        return self._scheduler.plan_at() - self._clock()

    def control(self, op: Control) -> list[str]:
        """Do it between the steps planned so far and those to come. What each worker says of it; of what workers have
        no part in, nothing. Raises RequestRejected where the configuration rules it out, EngineDeadError."""
        if isinstance(op, ResetCache):
            self.reset_prefix_cache()
            return []
        if self._profile_folder is None:
            raise RequestRejected("runtime.profile_folder is not set: there is no place for a profile of this model")
        answers = self._executor.control(op)
        self._got_on = self._clock()
        return answers

    def check(self) -> None:
        """Look after the workers while there is no step to wait for. Raises EngineDeadError when one has gone."""
        self._executor.check()

    def take_events(self) -> EventBatch | None:
        """What happened to the cached blocks since the last call; None where nothing did or cache.events is off."""
        return self._events.take() if self._events is not None else None

    def take_tokens(self) -> list[StoredTokens]:
        """The tokens of the blocks that the events taken last say are stored, where kv_events wants them."""
        return self._events.take_tokens() if self._events is not None else []

    def event_snapshot(self) -> EventSnapshot:
        """Every block that can be found now. Raises RequestRejected where cache.events is off."""
        if self._events is None:
            raise RequestRejected("cache.events is off: this engine keeps no events of its KV cache")
        return self._events.snapshot()

    def reset_prefix_cache(self) -> None:
        """Let no cached block be found any more. Running requests go on with theirs."""
        self._cache.forget_prefixes()

    def shutdown(self) -> None:
        """Stop the workers. May be called twice."""
        self._executor.shutdown()


def make_cache(config: ResolvedEngine, info: ModelInfo, events: EventLog | None) -> KVCacheManager:
    """The cache manager of a model as its workers report it."""
    return KVCacheManager(
        info.layout,
        num_blocks=info.num_blocks,
        hash_of=HASHES[config.cache.block_hash] if config.cache.prefix_caching else None,
        model=_named_prefixes(config),
        num_host_blocks=info.num_host_blocks,
        swap_costs=SwapCosts(info.block_bytes, info.prefill_tokens_per_s, info.swap_bytes_per_s),
        events=events,
    )


def _named_prefixes(config: ResolvedEngine) -> str:
    """What the names of prefixes say of the model: keys and values of another type, or with other scales, are
    others."""
    cache, named = config.cache, config.model.path
    if cache.dtype != "auto":
        named += f", {cache.dtype}"
    return f"{named}, scales {cache.scales}" if cache.scales != "checkpoint" else named


def _prefix_form(config: ResolvedEngine, info: ModelInfo) -> PrefixForm | None:
    cache = config.cache
    if not (cache.prefix_caching and cache.events):
        return None
    windows = info.layout.windows
    group = windows.index(0) if 0 in windows else 0
    return PrefixForm(_named_prefixes(config), info.layout.block_size, cache.block_hash, group)


def _wrapped(seed: int) -> int:
    """Keep a seed within its limits when it is counted up."""
    return seed if seed <= MAX_SEED else seed - 2 * (MAX_SEED + 1)
