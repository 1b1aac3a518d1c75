"""From the body of a request to a response that is ready to run."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec

from raylm.api.errors import HttpError
from raylm.api.identity import Identity
from raylm.api.preparation import Models, Preparation
from raylm.api.responses.approvals import approved_calls
from raylm.api.responses.keeper import Keeper
from raylm.api.responses.prompting import Asked, Prompt, prompt_of
from raylm.api.responses.records import Turn
from raylm.api.responses.remote import RemoteTools
from raylm.api.responses.request import Reading, ResponsesRequest, read_request
from raylm.api.responses.running import Remote, ResponseRun
from raylm.api.responses.tools import AskedTools, read_asked_tools, usable
from raylm.api.responses.wire import Item, Response, encode
from raylm.config.serving import HttpConfig
from raylm.errors import RequestRejected

_CONTINUED_BODIES = 4
"""A conversation that is continued may be as long as so many of the largest bodies."""


class Origin(NamedTuple):
    """Where a response comes from: its id, who asked for it, and when (seconds since the epoch; perf_counter)."""

    id: str
    identity: Identity
    created_at: int
    started: float


class Created(NamedTuple):
    """A response that may run; its own input's items, and its fields as JSON, where it runs in the background."""

    run: ResponseRun
    fields: ResponsesRequest
    items: bytes
    request: bytes


class Creation:
    """Reads requests for responses."""

    def __init__(
        self,
        models: Models,
        preparation: Preparation,
        config: HttpConfig,
        remote: RemoteTools,
        keeper: Keeper | None,
    ) -> None:
        self._models = models
        self._preparation = preparation
        self._config = config
        self._remote = remote
        self._keeper = keeper
        self.max_conversation = config.max_body_bytes * _CONTINUED_BODIES
        """Bytes of a conversation that is continued."""

    def is_stored(self, fields: ResponsesRequest) -> bool:
        """Raises RequestRejected where something must be stored and nothing can be."""
        if self._keeper is not None:
            return fields.store is not False
        for name in ("store", "background", "previous_response_id"):
            if getattr(fields, name) not in (None, False):
                raise RequestRejected(
                    f"{name} is not possible: this server stores no responses (responses.enabled)",
                    param=name,
                    code="unsupported_parameter",
                )
        return False

    async def created(self, body: bytes | bytearray, origin: Origin) -> Created:
        """Raises whatever is wrong with the request."""
        size = len(body)
        work = self._preparation.work
        reading = await work(size, partial(read_request, body, self._config))
        fields = reading.fields
        is_stored = self.is_stored(fields)
        model = self._models.get(fields.model)
        tools = read_asked_tools(fields.tools, self._remote)
        listings = [await self._remote.list(server) for server in tools.servers]
        usables = usable(tools, listings, fields.tool_choice, fields.parallel_tool_calls)
        before: list[Item] = []
        if fields.previous_response_id is not None:
            before, more = await self._before(fields.previous_response_id, origin.identity)
            size += more
        asked = Asked(fields, model, origin.identity, [*before, *reading.items], *usables)
        approved = await approved_calls(before, reading.items, usables.remote, self._remote)
        prompt = await work(size, partial(prompt_of, asked, [call.item() for call in approved]))
        response = _response(asked, prompt, tools, origin, is_stored=is_stored)
        run = ResponseRun(asked, prompt, response, Remote(self._remote, listings, approved), origin.started)
        items, request = await work(size, partial(_kept, reading)) if is_stored else (b"", b"")
        return Created(run, fields, items, request)

    async def _before(self, response_id: str, identity: Identity) -> tuple[list[Item], int]:
        """The items of the conversation up to this response, and how many bytes they have as JSON."""
        assert self._keeper is not None, "without a store it was refused"
        limit = self.max_conversation
        store = await self._keeper.store()
        found = await store.conversation(identity.tenant, response_id, max_bytes=limit)
        if found is None:
            raise not_found(response_id, "previous_response_id")
        if found.too_large is not None:
            raise RequestRejected(
                f"The conversation up to previous_response_id has {found.too_large} bytes, at most {limit} are allowed",
                param="previous_response_id",
            )
        if found.missing is not None:
            raise not_found(found.missing, "previous_response_id", f", which {found.turns[0].id} continues,")
        status = found.turns[-1].status
        if status not in ("completed", "incomplete"):
            raise RequestRejected(
                f"previous_response_id: {response_id} is {status}; only a completed or incomplete one can be continued",
                param="previous_response_id",
            )
        size = sum(len(turn.input) + len(turn.body) for turn in found.turns)
        return await self._preparation.work(size, partial(conversation_items, found.turns)), size


def conversation_items(turns: list[Turn]) -> list[Item]:
    """What was put in and what came out, of all turns."""
    items: list[Item] = []
    for turn in turns:
        items += msgspec.json.decode(turn.input, type=list[Item])
        items += msgspec.json.decode(turn.body, type=_Output).output
    return items


class _Output(msgspec.Struct):
    output: list[Item]


def not_found(response_id: str, param: str, which: str = "") -> HttpError:
    message = f"Response with id {response_id!r}{which} not found: there is none, or it was deleted, or it has expired"
    return HttpError(404, message, param=param, code="response_not_found")


def _kept(reading: Reading) -> tuple[bytes, bytes]:
    fields = reading.fields
    request = encode(fields.model_dump(exclude_none=True)) if fields.background else b""
    return encode(reading.items), request


def _response(asked: Asked, prompt: Prompt, tools: AskedTools, origin: Origin, *, is_stored: bool) -> Response:
    """The response as it begins."""
    fields, params = asked.fields, prompt.asked.wanted.params
    text = {"format": {"type": "text"} if fields.text is None or fields.text.format is None else fields.text.format}
    effort = None if fields.reasoning is None else fields.reasoning.effort
    return Response(
        id=origin.id,
        created_at=origin.created_at,
        status="queued" if fields.background else "in_progress",
        background=bool(fields.background),
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        max_tool_calls=fields.max_tool_calls,
        metadata=fields.metadata or {},
        model=asked.model.name,
        output=[],
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        previous_response_id=fields.previous_response_id,
        prompt_cache_key=fields.prompt_cache_key,
        reasoning={"effort": effort, "summary": None},
        safety_identifier=fields.safety_identifier,
        store=is_stored,
        temperature=params.temperature,
        text={**text, "verbosity": "medium"},
        tool_choice=fields.tool_choice if fields.tool_choice is not None else "auto",
        tools=tools.shown,
        top_logprobs=fields.top_logprobs or 0,
        top_p=params.top_p,
        truncation=fields.truncation or "disabled",
        user=fields.user,
    )
