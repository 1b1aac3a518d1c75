"""/v1/responses: create, fetch, delete, cancel, list what was put in."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

from raylm.api.call import Call, Events
from raylm.api.errors import HttpError, http_error
from raylm.api.identity import Identity
from raylm.api.preparation import Models
from raylm.api.responses import listing
from raylm.api.responses.background import follow, work
from raylm.api.responses.creating import Created, Creation, Origin, conversation_items, not_found
from raylm.api.responses.keeper import Keeper
from raylm.api.responses.records import NewResponse, StoredResponse, Turn
from raylm.api.responses.remote import RemoteTools
from raylm.api.responses.running import Machine, ResponseRun
from raylm.api.responses.wire import Deleted, EventMaker, Item, Response, encode, fault_of, with_status
from raylm.config.serving import HttpConfig
from raylm.errors import Overloaded, RequestRejected

if TYPE_CHECKING:
    from raylm.api.responses.store import ResponseStore

MAX_ATTEMPTS = 3
"""How often other ingresses try a background response whose ingress died; a request may be what ends them."""
_GONE = "The server's process that ran this response is gone; send the request again"


class Responses:
    """OpenAI's operations on responses. Without a keeper nothing is stored."""

    def __init__(
        self,
        models: Models,
        machine: Machine,
        config: HttpConfig,
        remote: RemoteTools,
        keeper: Keeper | None = None,
        *,
        identity_of: Callable[[str], Identity] = Identity,
    ) -> None:
        """`identity_of`: a tenant as it is known now, for its stored responses that are gone on with."""
        self._identity_of = identity_of
        self._machine = machine
        self._preparation = machine.preparation
        self._keeper = keeper
        self._creation = Creation(models, machine.preparation, config, remote, keeper)
        if keeper is not None:
            keeper.resume_by(self.resume, models.names)

    async def create(self, call: Call) -> bytes | Events:
        """POST /v1/responses."""
        origin = Origin(f"resp_{uuid4().hex}", call.identity, int(time.time()), call.started)
        created = await self._creation.created(call.body, origin)
        run, fields = created.run, created.fields
        try:
            await run.admit(self._machine, call.request_id, call.record)
            store = await self._stored(created, call.identity)
        except BaseException:
            await run.aclose()
            raise
        if store is not None and fields.background:
            return await self._in_background(created, store, call.identity)
        return self._stream(run, store) if fields.stream else await self._whole(run, store)

    async def retrieve(self, call: Call) -> bytes | Events:
        """GET /v1/responses/{id}; with stream=true the events of one that was created so, in the background."""
        response_id, tenant = call.path["response"], call.identity.tenant
        streams = listing.flag(call.query, "stream")
        store = await self._store(response_id)
        found = await store.get(tenant, response_id)
        if found is None:
            raise not_found(response_id, "response_id")
        if not streams:
            return await self._preparation.work(len(found.body), partial(with_status, found.body, found.status))
        after = listing.integer(call.query, "starting_after", -1, 0, 2**31 - 1)
        if not (found.background and found.streamed):
            raise RequestRejected(
                "Only a response that was created with background=true and stream=true can be streamed", param="stream"
            )
        return follow(store, tenant, response_id, after=after)

    async def delete(self, call: Call) -> bytes:
        """DELETE /v1/responses/{id}."""
        response_id = call.path["response"]
        store = await self._store(response_id)
        if not await store.delete(call.identity.tenant, response_id):
            raise not_found(response_id, "response_id")
        return encode(Deleted(response_id))

    async def cancel(self, call: Call) -> bytes:
        """POST /v1/responses/{id}/cancel, whichever ingress runs the response."""
        response_id, tenant = call.path["response"], call.identity.tenant
        store = await self._store(response_id)
        await store.cancel(tenant, response_id)
        found = await store.get(tenant, response_id)
        if found is None:
            raise not_found(response_id, "response_id")
        if not found.background:
            raise RequestRejected(
                "Only a response that was created with background=true can be cancelled; close the connection of "
                "another one",
                param="response_id",
            )
        if found.status != "cancelled":
            raise RequestRejected(f"The response is {found.status}: it cannot be cancelled", param="response_id")
        return await self._preparation.work(len(found.body), partial(with_status, found.body, found.status))

    async def input_items(self, call: Call) -> bytes:
        """GET /v1/responses/{id}/input_items: all that the model was given, but for instructions."""
        response_id = call.path["response"]
        store = await self._store(response_id)
        found = await store.conversation(call.identity.tenant, response_id, max_bytes=self._creation.max_conversation)
        if found is None:
            raise not_found(response_id, "response_id")
        if found.too_large is not None:
            raise RequestRejected(f"The conversation has {found.too_large} bytes, too many to be listed")
        size = sum(len(turn.input) + len(turn.body) for turn in found.turns)
        return await self._preparation.work(size, lambda: listing.page(input_of(found.turns), call.query))

    async def resume(self, store: ResponseStore, stored: StoredResponse) -> None:
        """Go on with a response whose ingress is gone: run it again where nobody has seen anything of it."""
        if not stored.background or stored.num_events or stored.attempts > MAX_ATTEMPTS:
            await self._give_up(store, stored, HttpError(503, _GONE, kind="server_error"))
            return
        assert self._keeper is not None, "there is a store"
        created_at = msgspec.json.decode(stored.body, type=_Created).created_at
        origin = Origin(stored.id, self._identity_of(stored.tenant), created_at, perf_counter())
        try:
            created = await self._creation.created(stored.request, origin)
            run = created.run
            await run.admit(self._machine)
        except Overloaded as error:
            await store.release(stored.id, after_s=error.retry_after)
            return
        except Exception as error:
            await self._give_up(store, stored, http_error(error))
            return
        await work(run, store, self._keeper, streams=stored.streamed)

    async def _give_up(self, store: ResponseStore, stored: StoredResponse, error: HttpError) -> None:
        body = with_status(stored.body, "failed", fault_of(error))
        if stored.streamed:
            events = EventMaker(stored.num_events)
            last = events.make("response.failed", {"response": msgspec.Raw(body)})
            await store.publish(stored.id, stored.num_events, stored.num_events, last)
        await store.write(stored.id, "failed", body)

    async def _store(self, response_id: str) -> ResponseStore:
        """Where a response may be. Without a store there is none."""
        if self._keeper is None:
            raise not_found(response_id, "response_id")
        return await self._keeper.store()

    async def _stored(self, created: Created, identity: Identity) -> ResponseStore | None:
        """Store a response that begins. None where it is not to be stored. Raises TenantFull."""
        response, fields = created.run.response, created.fields
        if not response.store:
            return None
        assert self._keeper is not None, "without a store it was refused"
        store = await self._keeper.store()
        new = NewResponse(
            id=response.id,
            tenant=identity.tenant,
            model=response.model,
            status=response.status,
            background=response.background,
            streamed=bool(fields.stream),
            previous_id=fields.previous_response_id,
            request=created.request,
            input=created.items,
            body=encode(response),
        )
        self._keeper.begin(response.id)
        try:
            await store.begin(new)
        except BaseException:
            self._keeper.end(response.id)
            raise
        return store

    async def _in_background(self, created: Created, store: ResponseStore, identity: Identity) -> bytes | Events:
        assert self._keeper is not None, "there is a store"
        response = created.run.response
        answer = encode(response)
        streams = bool(created.fields.stream)
        self._keeper.run(response.id, work(created.run, store, self._keeper, streams=streams))
        return follow(store, identity.tenant, response.id, after=-1) if streams else answer

    async def _whole(self, run: ResponseRun, store: ResponseStore | None) -> bytes:
        async with aclosing(self._stream(run, store)) as events:
            async for _ in events:
                pass
        if run.error is not None:
            raise run.error
        return encode(run.response)

    async def _stream(self, run: ResponseRun, store: ResponseStore | None) -> Events:
        """All events of a response whose client waits. It is stored before the last one."""
        ended = False
        try:
            async with aclosing(run.events()) as events:
                async for told in events:
                    yield told
            last = run.closing()
            if store is not None:
                try:
                    await store.write(run.response.id, run.response.status, encode(run.response))
                except HttpError as error:
                    run.fail(error)
                    last = run.closing()
            ended = True
            yield last
        finally:
            await run.aclose()
            if store is not None and self._keeper is not None:
                self._keeper.end(run.response.id)
                if not ended:
                    # The client has left.
                    run.response.status = "cancelled"
                    self._keeper.detach(_write(store, run.response))


async def _write(store: ResponseStore, response: Response) -> None:
    await store.write(response.id, response.status, encode(response))


class _Created(msgspec.Struct):
    created_at: int


def input_of(turns: list[Turn]) -> list[Item]:
    """What the last of some turns was given."""
    return conversation_items(turns[:-1]) + msgspec.json.decode(turns[-1].input, type=list[Item])
