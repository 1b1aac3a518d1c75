"""From an engine's tokens to the texts of a request: a prompt's sequences as they grow, and the best at their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

from raylm.core.step import Logprobs, TokenDelta
from raylm.errors import DeadlineExceeded, EngineDeadError, GenerationFailed, RequestRejected
from raylm.generation.choices import ChoiceDelta
from raylm.generation.job import Job, PromptJob
from raylm.generation.listing import (
    AnswerList,
    ChatEntries,
    LogprobForm,
    PromptEntries,
    TextEntries,
    TokenNames,
    joined,
    prompt_entries,
)
from raylm.generation.merge import merged
from raylm.generation.metering import ChoiceMeter, ModelMetrics
from raylm.generation.reader import ChoiceReader, Reading
from raylm.generation.record import Record
from raylm.generation.served_model import Deltas, ServedModel, Text, TextPiece, TextPieces
from raylm.text.stop import StopTable

_MAX_ON_THE_WAY = 256
"""Prompts of one HTTP request that are sent to an engine before it has taken the first of them. An EngineClient refuses
what is too much on its way; sending one takes some 0.1 ms of the event loop."""


class Origin(NamedTuple):
    """Whose tokens they are.

    reply_id: of which the engine's ids of its sequences are made.
    started: when its request arrived (perf_counter).
    continues_prompt: its texts go on from the prompt's, as those of a chat do not.
    logprobs: what its choices say of log probabilities.
    reading: how what the model wrote becomes pieces; None: all of it is text.
    record: of its HTTP request, where somebody wants one.
    """

    reply_id: str
    started: float
    continues_prompt: bool
    logprobs: LogprobForm = LogprobForm()
    reading: Reading | None = None
    record: Record | None = None


class Generation:
    """All sequences of one request. Must be closed: what has not ended by then is aborted in the engine."""

    def __init__(self, model: ServedModel, job: Job, metrics: ModelMetrics, origin: Origin) -> None:
        gate = asyncio.Semaphore(_MAX_ON_THE_WAY)
        if origin.record is not None:
            origin.record.has_prompts(model.name, job.prompt_tokens)
        # All choices share one table of stop strings.
        stops = model.text.stop_table(job.prompts[0].params)
        self._prompts = [
            _Echo(prompt) if prompt.echo_only else _Prompt(model, prompt, metrics, origin, stops, gate)
            for prompt in job.prompts
        ]

    async def admitted(self) -> None:
        """Return once the engine has taken every prompt into its queue. Raises what it refuses one with."""
        first, *others = self._prompts
        if not others:
            await first.admitted()
            return
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in self._prompts:
                    group.create_task(prompt.admitted())
        except ExceptionGroup as refusals:
            raise refusals.exceptions[0] from None

    def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """The texts of all sequences as they grow, until all have ended."""
        return merged([prompt.deltas() for prompt in self._prompts])

    def abort(self) -> None:
        """End what has not ended: the deltas go on with the finish reason "abort" of each such sequence."""
        for prompt in self._prompts:
            prompt.abort()

    async def aclose(self) -> None:
        for prompt in self._prompts:
            await prompt.aclose()


class _Echo:
    """The sequences of one prompt that is asked back and nothing more."""

    def __init__(self, job: PromptJob) -> None:
        self._job = job

    async def admitted(self) -> None:
        return

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        for index in range(self._job.first, self._job.first + self._job.params.n):
            yield ChoiceDelta(index, self._job.prefix, "length", 0)

    def abort(self) -> None:
        return

    async def aclose(self) -> None:
        return


class _Prompt:
    """The sequences of one prompt."""

    def __init__(
        self,
        model: ServedModel,
        job: PromptJob,
        metrics: ModelMetrics,
        origin: Origin,
        stops: StopTable | None,
        gate: asyncio.Semaphore,
    ) -> None:
        """`gate` is held while the prompt is on its way to the engine."""
        self._generator = model.generator
        self._gate = gate
        self._job = job
        self._metrics = metrics
        self._text = model.text
        self._logprobs = origin.logprobs
        self._record = origin.record
        self._live = {
            f"{origin.reply_id}-{index}": _Sequence(
                index,
                is_first=index == job.first,
                text=model.text.stream(job.params, continues_prompt=origin.continues_prompt, stops=stops),
                prefix=job.prefix,
                meter=ChoiceMeter(metrics, origin.started),
                entries=_answer_list(model.text, job, origin),
                reader=None if origin.reading is None else ChoiceReader(origin.reading),
            )
            for index in range(job.first, job.first + job.params.n)
        }
        self._early: list[TokenDelta] | None = None if job.params.prompt_logprobs is None else []
        """Deltas that wait for what the engine says of the prompt; None once that is here, or not asked for."""
        self._deltas: Deltas | None = None
        self._is_aborted = False
        self._outcome = "abort"
        self._longest = 0

    async def admitted(self) -> Deltas:
        """Ask the engine, once; return when it has taken the request."""
        if self._deltas is None:
            job = self._job
            with self._noting_errors():
                async with self._gate:
                    self._deltas = self._generator.generate(list(self._live), job.prompt_ids, job.params, job.options)
                    if self._is_aborted:
                        self._deltas.abort()
                    await self._admit(self._deltas)
                    if self._record is not None:
                        self._record.runs_at(self._deltas.engine_id, self._deltas.route)
        return self._deltas

    async def _admit(self, deltas: Deltas) -> None:
        try:
            await deltas.admitted()
        except RequestRejected as error:
            if not (self._logprobs.as_chat and error.param == "logprobs"):
                raise
            # The engine's number of log probabilities is a chat's top_logprobs.
            raise RequestRejected(f"top_{error}", param="top_logprobs", code=error.code) from None

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        live = self._live
        is_new = True
        with self._noting_errors():
            deltas = await self.admitted()
            async for arrived in deltas:
                for delta in (arrived,) if self._early is None else await self._after_prompt(arrived):
                    gained = self._push(delta, deltas)
                    if is_new:
                        self._metrics.prompt_begun(len(self._job.prompt_ids), self._job.params)
                        is_new = False
                    self._metrics.num_cached_tokens += gained.num_cached
                    if gained.finish_reason is not None:
                        # Before the yield: a stop string must free the engine before a slow client has read.
                        deltas.end(delta.request_id)
                        self._finished([live.pop(delta.request_id)], gained.finish_reason)
                    yield gained
            if live:
                raise EngineDeadError("The engine ended a completion without a reason")

    def _push(self, delta: TokenDelta, deltas: Deltas) -> ChoiceDelta:
        record = self._record
        if record is None:
            return self._live[delta.request_id].push(delta)
        began = perf_counter()
        gained = self._live[delta.request_id].push(delta)
        record.gained(gained, delta.waited, perf_counter() - began)
        record.runs_at(deltas.engine_id, deltas.route)
        return gained

    def _finished(self, sequences: Iterable[_Sequence], reason: str) -> None:
        """These have ended and live no more."""
        for sequence in sequences:
            sequence.meter.finished(reason)
            self._longest = max(self._longest, sequence.meter.num_tokens)
            if self._record is not None:
                self._record.finish_reasons.append(reason)
        if not self._live:
            self._metrics.prompt_ended(self._longest)

    async def _after_prompt(self, delta: TokenDelta) -> list[TokenDelta]:
        """The deltas that may go on. The first delta of the first sequence has what the engine says of the prompt, with
        which every choice begins; where whole sequences come at once, another may come before."""
        assert self._early is not None, "only before the prompt's log probabilities are here"
        self._early.append(delta)
        if delta.request_id != next(iter(self._live)):
            return []
        ready, self._early = self._early, None
        job = self._job
        found = await prompt_entries(self._logprobs, self._text, job.prompt_ids, job.prefix, delta.prompt_logprobs)
        for sequence in self._live.values():
            sequence.prompt = found
        return ready

    def abort(self) -> None:
        self._is_aborted = True
        if self._deltas is not None:
            self._deltas.abort()

    async def aclose(self) -> None:
        if self._deltas is not None:
            await self._deltas.aclose()
        if ended := list(self._live.values()):
            self._live.clear()
            self._finished(ended, self._outcome)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._outcome = "deadline" if isinstance(error, DeadlineExceeded) else "error"
            if self._record is not None:
                self._record.error = type(error).__name__
            raise


class _Sequence:
    """One sequence on its way from tokens to text."""

    def __init__(
        self,
        index: int,
        *,
        is_first: bool,
        text: TextPieces,
        prefix: str,
        meter: ChoiceMeter,
        entries: AnswerList | None,
        reader: ChoiceReader | None,
    ) -> None:
        self._index = index
        self._is_first = is_first
        self._text = text
        self._prefix = prefix
        self._entries = entries
        self._reader = reader
        self.prompt = PromptEntries(None, None)
        """What the first delta says of the prompt."""
        self.meter = meter

    def push(self, delta: TokenDelta) -> ChoiceDelta:
        """Raises DeadlineExceeded and GenerationFailed where the engine gave it up."""
        if delta.finish_reason == "deadline":
            raise DeadlineExceeded(delta.message or "The request's time was up before it was done")
        if delta.finish_reason == "error":
            message = delta.message or "The engine failed on this request"
            raise GenerationFailed(message)
        if delta.waited is not None:
            self.meter.waited(delta.waited)
        piece = self._text.push(delta.token_ids, delta.finish_reason)
        self.meter.tokens(piece.num_tokens)
        text = self._prefix + piece.text
        self._prefix = ""
        used = piece.num_tokens
        gained = ChoiceDelta(
            self._index,
            text,
            piece.finish_reason,
            used,
            logprob=sum(delta.logprobs.values[:used]) if delta.logprobs is not None else 0.0,
            # A prompt counts once: with its first sequence.
            num_cached=delta.num_cached_tokens if self._is_first else 0,
            token_ids=delta.token_ids if used == len(delta.token_ids) else delta.token_ids[:used],
            stop_reason=piece.stop_reason,
        )
        if self._reader is not None:
            gained = self._reader.read(gained)
        return gained if self._entries is None and self.prompt.listed is None else self._described(gained, delta, piece)

    def _described(self, gained: ChoiceDelta, delta: TokenDelta, piece: TextPiece) -> ChoiceDelta:
        """With the log probabilities that the client asked for."""
        (echoed, listed), self.prompt = self.prompt, PromptEntries(None, None)
        own = None
        if self._entries is not None:
            found = delta.logprobs if delta.logprobs is not None else Logprobs([], [], [], [])
            own = self._entries.push(gained.token_ids, found.first(gained.num_tokens), piece)
        parts = [entries for entries in (echoed, own) if entries is not None]
        return gained._replace(entries=joined(parts) if parts else None, prompt_list=listed)


def _answer_list(text: Text, job: PromptJob, origin: Origin) -> AnswerList | None:
    """What lists the tokens of one sequence; None where the client asked for no log probabilities."""
    form = origin.logprobs
    if form.top is None:
        return None
    names = TokenNames(text, chat=form.as_chat, as_ids=form.as_ids)
    entries = ChatEntries(names) if form.as_chat else TextEntries(names)
    detokenizer = text.detokenizer(job.params, continues_prompt=origin.continues_prompt)
    return AnswerList(entries, detokenizer, len(job.prefix))
