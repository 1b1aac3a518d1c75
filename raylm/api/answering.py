"""From a draft of a request to its answer, whatever API it came by."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from typing import NamedTuple, Protocol
from uuid import uuid4

from raylm.api.call import Call, Events
from raylm.api.errors import http_error
from raylm.api.interval import Interval
from raylm.api.metrics import HttpMetrics
from raylm.api.params import Asking
from raylm.api.quota import reserved
from raylm.api.running_requests import RunningRequests
from raylm.api.wire import Reply
from raylm.generation.choices import ChoiceDelta, Tally, Whole, gather
from raylm.generation.job import Job
from raylm.generation.reader import Reading
from raylm.generation.running import Generation, Origin
from raylm.generation.served_model import ServedModel


class Encoder(Protocol):
    """Writes the answer to one request in the words of its API."""

    def opening(self) -> bytes:
        """The events before the first token."""
        ...

    def chunk(self, delta: ChoiceDelta, tally: Tally) -> bytes:
        """The events of what a choice gained; empty when there is nothing to say."""
        ...

    def closing(self, tally: Tally) -> bytes:
        """The events after all choices have ended."""
        ...

    def failed(self, error: Exception) -> bytes:
        """The events of a stream that an error ends."""
        ...

    def answer(self, choices: Sequence[Whole], tally: Tally) -> bytes:
        """The whole answer, where it is not streamed."""
        ...


class Draft(NamedTuple):
    """A request that was read; its prompts are no tokens yet.

    field: where in the body the prompts came from. id_prefix: how the answer's id begins.
    continues_prompt: the answer's text goes on from the prompt's, as that of a chat does not.
    reading: how the model's text becomes pieces; None: all of it is text.
    reply_id: the answer's whole id, where it is known already.
    """

    model: ServedModel
    asked: Asking
    prompts: list[str | list[int]]
    field: str
    encoder: Callable[[Reply, Job], Encoder]
    id_prefix: str
    continues_prompt: bool = False
    reading: Reading | None = None
    reply_id: str | None = None


class Answering:
    """Runs requests that are ready."""

    def __init__(self, metrics: HttpMetrics, requests: RunningRequests) -> None:
        """Requests are in `requests` while they run."""
        self._metrics = metrics
        self._requests = requests

    async def answer(self, draft: Draft, job: Job, call: Call) -> bytes | Events:
        """`job` is the draft's, which came with `call`."""
        model, answer = draft.model, draft.asked.answer
        # Ids of clients may be those of others: an engine gets its own.
        own_id = draft.reply_id or draft.id_prefix + uuid4().hex
        reply = Reply(answer.name.reply_id(draft.id_prefix) or own_id, int(time.time()), model.name)
        origin = Origin(own_id, call.started, draft.continues_prompt, answer.logprobs, draft.reading, call.record)
        generation = Generation(model, job, self._metrics.model(model.name), origin)
        tally = Tally(job.prompt_tokens, call.started)
        encoder = draft.encoder(reply, job)
        names = (reply.id, answer.name.given, call.request_id)
        entry = self._requests.entered(call.identity.tenant, names, generation)
        room = reserved(call.identity.quota, job, draft.asked.wanted.limit, tally)
        if answer.stream:
            return _events(encoder, generation, tally, Interval(answer.interval), entry, room, call.request_id)
        async with room, aclosing(generation):
            with entry:
                chosen = await gather(job, generation.deltas(), tally)
        return encoder.answer(chosen, tally)


async def _events(
    encoder: Encoder,
    generation: Generation,
    tally: Tally,
    interval: Interval,
    entry: AbstractContextManager[None],
    room: AbstractAsyncContextManager[None],
    request_id: str,
) -> Events:
    """SSE events, the first as soon as the engine has taken the request, though it may wait for its turn there.

    An error before that is raised, a later one becomes an event; `request_id` is what the log calls it by.
    """
    async with room, aclosing(generation):
        with entry:
            await generation.admitted()
            yield encoder.opening()
            try:
                async with aclosing(generation.deltas()) as deltas:
                    async for delta in deltas:
                        tally.add(delta)
                        due = interval.push(delta)
                        chunk = b"" if due is None else encoder.chunk(due, tally)
                        if chunk:
                            yield chunk
            except Exception as error:
                # The engine is free before a slow client has read.
                await generation.aclose()
                problem = http_error(error, request_id)
                yield b"".join(encoder.chunk(delta, tally) for delta in interval.rest()) + encoder.failed(problem)
                return
    yield encoder.closing(tally)
