"""ResponseRun: one response while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import NamedTuple

from raylm.api.call import Events
from raylm.api.errors import HttpError, http_error
from raylm.api.metrics import HttpMetrics
from raylm.api.preparation import Preparation
from raylm.api.quota import reserved
from raylm.api.responses.approvals import ApprovedCall
from raylm.api.responses.open_items import ListedTools, OpenRemoteCall
from raylm.api.responses.prompting import FIELD, Asked, Prompt, prompt_of
from raylm.api.responses.remote import Listing, RemoteTools
from raylm.api.responses.wire import Response
from raylm.api.responses.writer import ResponseWriter
from raylm.api.running_requests import RunningRequests
from raylm.generation.choices import Counts, Tally
from raylm.generation.record import Record
from raylm.generation.running import Generation, Origin

_ITEM_BYTES = 512
"""What an item is taken for where it is only a question of whether a thread is worth it."""


class Remote(NamedTuple):
    """Tools of MCP servers in one response: who calls them, what the servers have listed, and the calls that the client
    has approved in its input and that have been made."""

    tools: RemoteTools
    listings: Sequence[Listing] = ()
    approved: Sequence[ApprovedCall] = ()


class Machine(NamedTuple):
    """What requests are run by, and where they can be found meanwhile."""

    preparation: Preparation
    metrics: HttpMetrics
    requests: RunningRequests


class ResponseRun:
    """Generates one response and writes it. Must be closed: what has not ended by then is aborted in the engine."""

    def __init__(self, asked: Asked, prompt: Prompt, response: Response, remote: Remote, started: float) -> None:
        """`started`: when the request arrived (perf_counter)."""
        self._asked = asked
        self._prompt = prompt
        self._remote = remote
        self._started = started
        self._writer = ResponseWriter(response, asked.remote)
        self._tallies: list[Tally] = []
        self._generation: Generation | None = None
        self._record: Record | None = None
        self._num_calls = 0
        self._room = AsyncExitStack()
        """What the round in hand has reserved of the tenant's limits."""
        self.response = response
        self.error: HttpError | None = None
        """What ended it, if anything did."""

    async def admit(self, machine: Machine, request_id: str = "", record: Record | None = None) -> None:
        """Return once the engine has taken it. Raises what is wrong with it, and why no engine takes it. `request_id`:
        another name than its id, by which the client may end it. `record`: of the HTTP request that asked for it."""
        self._machine = machine
        self._names = (self.response.id, request_id)
        self._record = record
        self._generation = await self._begin(self._prompt)

    async def _begin(self, prompt: Prompt) -> Generation:
        model = self._asked.model
        asking, job = await self._machine.preparation.job_of(model, prompt.asked, [prompt.text], FIELD)
        number = len(self._tallies)
        self._tallies.append(Tally(job.prompt_tokens))
        await self._room.enter_async_context(
            reserved(self._asked.identity.quota, job, asking.wanted.limit, self._tallies[-1])
        )
        name = f"{self.response.id}-{number}" if number else self.response.id
        origin = Origin(name, self._started, False, asking.answer.logprobs, prompt.reading, self._record)
        generation = Generation(model, job, self._machine.metrics.model(model.name), origin)
        try:
            await generation.admitted()
        except BaseException as error:
            await generation.aclose()
            # Nothing is paid for what no engine has taken.
            await self._room.__aexit__(type(error), error, error.__traceback__)
            raise
        return generation

    async def events(self) -> Events:
        """Its events but for the last one, which `closing` gives. An error ends them, and is in `error` then."""
        yield self._writer.opening() + self._told_before()
        try:
            async with aclosing(self._rounds()) as rounds:
                async for told in rounds:
                    yield told
        except Exception as error:
            # The engine is free before a slow client has read.
            await self.aclose()
            self.error = http_error(error)
            self._writer.fail(self.error)

    async def _rounds(self) -> Events:
        """What the model writes, and what the tools answer that it calls, until it calls none."""
        writer = self._writer
        for number in range(1, self._remote.tools.max_rounds + 2):
            first = len(self.response.output)
            async with aclosing(self._round()) as round_:
                async for told in round_:
                    yield told
            waiting = writer.waiting()
            if not waiting:
                return
            for call in waiting:
                yield await self._call(call)
            if any(item["type"] == "function_call" for item in self.response.output[first:]):
                return  # The client's turn.
            await self._next_round(is_last=number >= self._remote.tools.max_rounds)

    async def _round(self) -> Events:
        assert self._generation is not None, "admit has been called"
        finish_reason: str | None = None
        entry = self._machine.requests.entered(self._asked.identity.tenant, self._names, self._generation)
        with entry:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    self._tallies[-1].add(delta)
                    finish_reason = delta.finish_reason
                    if told := self._writer.push(delta):
                        yield told
        yield self._writer.end_round(finish_reason)

    async def _call(self, call: OpenRemoteCall) -> bytes:
        """The events of a call of an MCP server's tool that has been answered."""
        self._num_calls += 1
        limit = self._asked.fields.max_tool_calls
        if limit is not None and self._num_calls > limit:
            call.finish(None, f"max_tool_calls is {limit}: no more calls are made")
        else:
            tool, trace = call.tool, "" if self._record is None else self._record.traceparent
            call.finish(*await self._remote.tools.call(tool.server, tool.name, call.arguments, traceparent=trace))
        return self._writer.close(call)

    async def _next_round(self, *, is_last: bool) -> None:
        limit = self._asked.fields.max_tool_calls
        is_last = is_last or (limit is not None and self._num_calls >= limit)
        more = list(self.response.output)
        make = partial(prompt_of, self._asked, more, choice="none" if is_last else "auto")
        prompt = await self._machine.preparation.work(_ITEM_BYTES * (len(more) + len(self._asked.items)), make)
        await self.aclose()
        self._generation = await self._begin(prompt)

    def _told_before(self) -> bytes:
        """What happened before the model began: lists of tools, and calls that the client had approved."""
        writer, told = self._writer, b""
        for listing in self._remote.listings:
            item = ListedTools(writer.events, writer.next_index(), listing.server.label, listing.listed)
            told += writer.begin(item) + writer.close(item)
        for made in self._remote.approved:
            call = OpenRemoteCall(writer.events, writer.next_index(), made.tool, approval_id=made.request_id)
            told += writer.begin(call) + call.push(made.arguments) + call.written()
            call.finish(made.output, made.error)
            told += writer.close(call)
        return told

    def closing(self) -> bytes:
        """The last event; the response is complete then."""
        counts = [tally.counts() for tally in self._tallies]
        return self._writer.closing(Counts(*map(sum, zip(*counts, strict=True))))

    def fail(self, error: HttpError) -> None:
        """End it with an error from elsewhere."""
        self.error = error
        self._writer.fail(error)

    async def aclose(self) -> None:
        if self._generation is not None:
            await self._generation.aclose()
        await self._room.aclose()
