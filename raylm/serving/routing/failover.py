"""Requests that outlive the engines they run on."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from raylm.config.routing import RoutingConfig
from raylm.core.options import RequestOptions
from raylm.core.request import Begun
from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta
from raylm.engine.streams import Sequences
from raylm.errors import (
    ConnectionLost,
    DeadlineExceeded,
    EngineDeadError,
    EngineStopped,
    GenerationFailed,
    Overloaded,
    RequestLost,
    ServerStopped,
)
from raylm.log import get_logger
from raylm.serving.routing.choice import Ask, Choice

logger = get_logger(__name__)

_SILENT_S = 2.0
"""After so long in waiting for an engine a stream begins nevertheless: its comments tell the client that it lives."""
_AVOID_S = 3.0
"""An engine that was lost is not asked again for so long, however well it looks."""
_TURN_S = 0.25
"""Between looks whether a request that waits was aborted, or its time is up."""
_FULL_S = 0.5
"""Between attempts where all queues are full."""
_RETRY_AFTER_S = 5.0
_SURVIVABLE = (EngineDeadError, EngineStopped, ConnectionLost)


class Router(Protocol):
    """What chooses engines."""

    @property
    def config(self) -> RoutingConfig: ...
    @property
    def name(self) -> str: ...
    @property
    def closed(self) -> str | None:
        """Why no more requests are taken."""
        ...

    def choose(self, ask: Ask, *, avoid: Set[str] = frozenset()) -> Choice | None:
        """An engine for a request, none of those to `avoid` (ids); None where there is none."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """Around the wait of a new request. Raises Overloaded where too many wait."""
        ...

    def hold_s(self, since: float) -> float:
        """Seconds that a new request may wait which waits since then (time.monotonic)."""
        ...

    def refusal(self) -> Overloaded:
        """Of a request that has waited for so long."""
        ...

    async def engine_there(self, limit_s: float) -> None:
        """Return when an engine can be chosen, or after so many seconds."""
        ...

    def resumed(self) -> None:
        """A live request goes on at another engine."""
        ...


class _Live:
    """A sequence that has not ended: its number among those of its prompt, and the tokens that have come."""

    __slots__ = ("has_begun", "index", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.has_begun = False
        """Its first delta has come."""


class Journey:
    """The deltas of one prompt's sequences, from one engine after the other.

    Where an engine is lost, what has not ended goes on at another one from the prompt and the tokens that have come.
    Every token's random number follows from its seed and position alone, and penalties, grammars and budgets from the
    tokens before it: so no token is missing, none comes twice, and all are those that the first engine would have
    given. Sequences of a beam search begin anew: none of their tokens has come before the end.
    """

    def __init__(
        self,
        router: Router,
        request_ids: Sequence[str],
        prompt_ids: list[int],
        params: SamplingParams,
        options: RequestOptions,
    ) -> None:
        self._router = router
        self._ask = Ask(prompt_ids, options, len(request_ids))
        self._params = params
        self._live = {request_id: _Live(index) for index, request_id in enumerate(request_ids)}
        self._arrived = time.monotonic()
        self._current: Sequences | None = None
        self._choice: Choice | None = None
        self._is_admitted = False
        self._waits_since: float | None = None
        self._avoid: dict[str, float] = {}
        self._deaths = 0
        self._loss: RequestLost | None = None
        self._num_losses = 0
        self._suffix = ""
        """What the engine's ids of the sequences have at their end: one that lost only the connection may still have
        them by those from before."""
        self._is_aborted = False
        self._farewell: deque[TokenDelta] = deque()

    @property
    def engine_id(self) -> str:
        """The engine that has it, or had it last; empty before."""
        return "" if self._choice is None else self._choice.engine.entry.engine_id

    @property
    def route(self) -> str:
        """Why it is that engine."""
        choice = self._choice
        return "" if choice is None else f"{choice.reason}; matched-tokens={choice.matched_tokens}"

    async def admitted(self) -> None:
        """Return once an engine has taken the request into its queue; while there is none, after two seconds.

        Raises RequestRejected, Overloaded where no engine takes it, GenerationFailed, DeadlineExceeded, RequestLost.
        """
        if not self._is_admitted:
            await self._find(time.monotonic() + _SILENT_S)

    def __aiter__(self) -> Journey:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            if self._farewell:
                return self._farewell.popleft()
            if not self._live:
                raise StopAsyncIteration
            if self._current is None:
                await self._find()
                continue
            try:
                return self._noted(await self._current.__anext__())
            except _SURVIVABLE as loss:
                self._lost(loss)

    def end(self, request_id: str) -> None:
        """The reader needs no more of this sequence."""
        if self._current is not None:
            self._current.end(request_id + self._suffix)
        self._live.pop(request_id, None)

    def abort(self) -> None:
        """End the sequences that have not ended; the reader gets what has come, and the finish reason "abort"."""
        self._is_aborted = self._is_admitted = True
        if self._current is not None:
            self._current.abort()
        else:
            self._say_farewell()

    async def aclose(self) -> None:
        """Abort the sequences that have not ended."""
        if self._current is not None:
            await self._current.aclose()
        self._live.clear()

    def _noted(self, delta: TokenDelta) -> TokenDelta:
        """A delta on its way to the reader. What an engine says of the prompt is told once."""
        if self._loss is not None:
            delta = delta._replace(request_id=delta.request_id.removesuffix(self._suffix))
        live = self._live.get(delta.request_id)
        if live is None:
            return delta
        if live.has_begun and self._loss is not None:
            delta = delta._replace(num_cached_tokens=0, prompt_logprobs=None, waited=None)
        if delta.finish_reason is None:
            live.token_ids += delta.token_ids
            live.has_begun = True
        else:
            del self._live[delta.request_id]
        return delta

    def _say_farewell(self) -> None:
        self._farewell.extend(TokenDelta(request_id, [], "abort") for request_id in self._live)
        self._live.clear()

    def _lost(self, loss: RequestLost) -> None:
        """The engine has gone with what was live. Raises the loss where nothing can go on."""
        self._current = None
        if self._is_aborted:
            self._say_farewell()
            return
        self._loss = loss
        self._num_losses += 1
        self._suffix = f"~{self._num_losses}"
        if self._choice is not None and not isinstance(loss, ConnectionLost):
            self._avoid[self._choice.engine.entry.engine_id] = time.monotonic() + _AVOID_S
        self._deaths += isinstance(loss, EngineDeadError)
        config = self._router.config
        if self._deaths >= config.max_engine_deaths:
            message = (
                f"The request was on {self._deaths} engines when they died, the most that it may; the last: {loss}"
            )
            raise GenerationFailed(message) from loss
        if config.failover_wait_s == 0 and self._is_admitted:
            raise loss

    async def _find(self, until: float = float("inf")) -> None:
        """Have an engine take what is live; return when it has, or at `until`. Raises what `admitted` says."""
        refusal: Overloaded | None = None
        full: set[str] = set()
        while self._live and time.monotonic() < until:
            if self._router.closed is not None:
                raise self._stopped(self._router.closed)
            choice = self._router.choose(self._ask, avoid=self._avoided() | full)
            if choice is None and refusal is not None and self._waits_since is None and not self._is_admitted:
                raise refusal
            if choice is None:
                if refusal is not None:
                    # Who has waited for engines waits for room in them too: those who were live have come first.
                    await asyncio.sleep(min(_FULL_S, refusal.retry_after))
                full.clear()
                await self._wait(until, refusal)
                continue
            try:
                await self._begin(choice)
            except Overloaded as error:
                # The others may have room.
                full.add(choice.engine.entry.engine_id)
                refusal = error if refusal is None or error.retry_after < refusal.retry_after else refusal
                self._current = None
            except _SURVIVABLE as loss:
                self._lost(loss)
            else:
                return

    async def _begin(self, choice: Choice) -> None:
        """Send what is live to an engine. Raises what it refuses it with, and its loss."""
        resumes = self._is_admitted and not self._params.beam_width
        begun = [Begun(live.index, live.token_ids) for live in self._live.values()] if resumes else []
        self._choice = choice
        self._current = choice.engine.client.generate(
            [request_id + self._suffix for request_id in self._live],
            self._ask.prompt_ids,
            self._rest() if resumes else self._params,
            self._options(),
            begun,
            num_cached=choice.matched_tokens,
        )
        await self._current.admitted()
        if self._is_admitted and not self._is_aborted:
            self._router.resumed()
            number, engine_id = len(self._live), choice.engine.entry.engine_id
            logger.info("%d sequences go on at engine %s: %s", number, engine_id, self._loss)
        self._is_admitted = True
        self._waits_since = None

    def _rest(self) -> SamplingParams:
        """What an engine that goes on is asked. The prompt's log probabilities come with the first sequence, once."""
        first = next(iter(self._live.values()))
        if self._params.prompt_logprobs is None or not (first.has_begun or first.index):
            return self._params
        return replace(self._params, prompt_logprobs=None)

    def _options(self) -> RequestOptions:
        """With the time that is left. One that has run has done with the queue. Raises DeadlineExceeded."""
        options = self._ask.options
        if options.deadline_s is None and options.queue_timeout_s is None:
            return options
        passed = time.monotonic() - self._arrived
        deadline, in_queue = options.deadline_s, options.queue_timeout_s
        if deadline is not None and passed >= deadline:
            raise DeadlineExceeded(f"deadline_s is {deadline:g}, which was up while the request waited for an engine")
        if in_queue is not None and passed >= in_queue and not self._is_admitted:
            raise DeadlineExceeded(f"queue_timeout_s is {in_queue:g}, which was up while no engine took the request")
        return replace(
            options,
            deadline_s=None if deadline is None else deadline - passed,
            queue_timeout_s=None if in_queue is None or self._is_admitted else in_queue - passed,
        )

    async def _wait(self, until: float, refusal: Overloaded | None) -> None:
        """Wait a while for an engine, or for room in those that gave the `refusal`. Raises what ends the request where
        none has come in time."""
        self._options()
        now, router = time.monotonic(), self._router
        since = self._waits_since = now if self._waits_since is None else self._waits_since
        left = since - now + (router.config.failover_wait_s if self._is_admitted else router.hold_s(since))
        if left <= 0:
            raise self._gone(refusal)
        limit_s = min(left, until - now, _TURN_S)
        if self._is_admitted:
            await router.engine_there(limit_s)
            return
        with router.held():
            await router.engine_there(limit_s)

    def _avoided(self) -> set[str]:
        now = time.monotonic()
        return {engine_id for engine_id, until in self._avoid.items() if until > now}

    def _gone(self, refusal: Overloaded | None) -> Exception:
        """Why a request ends for which there was no engine."""
        if self._is_admitted and self._loss is not None:
            waited = self._router.config.failover_wait_s
            return type(self._loss)(f"{self._loss}; no other engine could go on within {waited:g} s")
        return refusal or self._router.refusal()

    def _stopped(self, reason: str) -> Exception:
        return ServerStopped(reason) if self._is_admitted else Overloaded(reason, retry_after=_RETRY_AFTER_S)
