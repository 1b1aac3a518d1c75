"""Stored and background responses, through the real openai client; two servers on one database are two ingresses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI

from raylm.api.responses import background, keeper, service, store
from raylm.api.responses.faults import StoreUnavailable
from raylm.config.responses import ResponsesConfig
from raylm.errors import Overloaded, ServerStopped
from tests.support.openai_fakes import ByteText, RawClient, Server, said


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[None]:
    """What a server of ASGI applications does around its requests: the ingress looks after its responses."""
    begins, ends = asyncio.Event(), asyncio.Event()
    inbox = asyncio.Queue[dict[str, str]]()

    async def send(message: Any) -> None:
        {"lifespan.startup.complete": begins, "lifespan.shutdown.complete": ends}[message["type"]].set()

    task = asyncio.create_task(server.app({"type": "lifespan"}, inbox.get, send))
    inbox.put_nowait({"type": "lifespan.startup"})
    await begins.wait()
    try:
        yield
    finally:
        inbox.put_nowait({"type": "lifespan.shutdown"})
        await ends.wait()
        await task


async def _buried(server: Server) -> None:
    """End the tasks of an ingress that counts as dead, and close its connections."""
    async with running(server):
        pass


class Cluster:
    """Ingresses on one database. One that is not started is an ingress that died: it renews no lease."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stack = AsyncExitStack()

    async def ingress(self, *script: Any, starts: bool = True, http: Any = None, **config: Any) -> Server:
        responses = ResponsesConfig(url=self._url, **config)
        server = Server(*script, max_model_len=4096, text=ByteText(), responses=responses, **(http or {}))
        if starts:
            await self._stack.enter_async_context(running(server))
        else:
            self._stack.push_async_callback(_buried, server)
        return server

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()


@pytest.fixture
async def cluster(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """No pause of a busy machine is as long as a lease; `brief_leases` are for ingresses that die."""
    monkeypatch.setattr(store, "LEASE_S", 600.0)
    monkeypatch.setattr(keeper, "RENEW_EVERY_S", 0.1)
    monkeypatch.setattr(keeper, "CLAIM_EVERY_S", 0.2)
    async with Cluster(database_url) as cluster:
        yield cluster


@contextmanager
def brief_leases() -> Iterator[None]:
    """Of what begins meanwhile: whoever waits for the end of such a lease waits for little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "LEASE_S", 0.1)
        yield


def client_of(server: Server, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://raylm/v1", api_key=key, http_client=server.http, max_retries=0)


def prompt_of(server: Server, number: int = -1) -> str:
    return bytes(server.generator.requests[number].prompt_ids).decode()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def ended(client: AsyncOpenAI, response_id: str) -> Any:
    while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.05)
    return response


async def test_a_response_is_fetched_from_any_ingress_and_deleted(cluster):
    one, two = await cluster.ingress(*said("Hello.")), await cluster.ingress()
    created = await client_of(one).responses.create(model="tiny", input="hi", metadata={"a": "b"})
    assert created.store is True
    assert await client_of(two).responses.retrieve(created.id) == created
    await client_of(two).responses.delete(created.id)
    for client in (client_of(one), client_of(two)):
        with pytest.raises(openai.NotFoundError) as error:
            await client.responses.retrieve(created.id)
        assert error.value.code == "response_not_found"


async def test_a_streamed_response_is_there_when_its_last_event_is(cluster):
    server = await cluster.ingress(*said("Hello."))
    client = client_of(server)
    stream = await client.responses.create(model="tiny", input="hi", stream=True)
    last = [event async for event in stream][-1]
    assert await client.responses.retrieve(last.response.id) == last.response


async def test_store_false_is_honoured(cluster):
    client = client_of(await cluster.ingress(*said("Hello.")))
    created = await client.responses.create(model="tiny", input="hi", store=False)
    assert created.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(created.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await client.responses.create(model="tiny", input="hi", previous_response_id=created.id)


async def test_a_conversation_goes_on_at_another_ingress(cluster):
    one, two = await cluster.ingress(*said("First.")), await cluster.ingress(*said("Second."))
    first = await client_of(one).responses.create(model="tiny", input="one", instructions="Only once.")
    second = await client_of(two).responses.create(model="tiny", input="two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert prompt_of(two) == "user: one\nassistant: First.\nuser: two\n>"
    one.generator.script = said("Third.")
    third = await client_of(one).responses.create(
        model="tiny", input=[{"role": "user", "content": "three"}], previous_response_id=second.id
    )
    assert prompt_of(one) == "user: one\nassistant: First.\nuser: two\nassistant: Second.\nuser: three\n>"
    items = [item async for item in client_of(two).responses.input_items.list(third.id, order="asc", limit=2)]
    assert [item.content[0].text for item in items] == ["one", "First.", "two", "Second.", "three"]
    newest = await client_of(two).responses.input_items.list(third.id, limit=1)
    assert newest.data[0].content[0].text == "three" and newest.has_more and newest.first_id == items[-1].id
    await client_of(one).responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=f"{first.id}', which {second.id} continues, not found"):
        await client_of(one).responses.create(model="tiny", input="four", previous_response_id=third.id)


async def test_a_response_is_its_tenants(cluster, tmp_path: Path):
    lines = [json.dumps({"key": key, "tenant": tenant}) for key, tenant in (("k1", "a"), ("k2", "a"), ("k3", "b"))]
    (tmp_path / "keys").write_text("\n".join(lines))
    server = await cluster.ingress(*said("Hello."), http={"api_keys_file": str(tmp_path / "keys")})
    created = await client_of(server, "k1").responses.create(model="tiny", input="hi")
    assert (await client_of(server, "k2").responses.retrieve(created.id)).id == created.id
    other = client_of(server, "k3").responses
    for attempt in (
        other.retrieve(created.id),
        other.delete(created.id),
        other.cancel(created.id),
        other.input_items.list(created.id),
        other.create(model="tiny", input="hi", previous_response_id=created.id),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            await attempt
        assert error.value.code == "response_not_found"


async def test_what_a_tenant_may_store_is_limited(cluster):
    server = await cluster.ingress(*said("Hello."), max_tenant_mib=1500 / 2**20)
    client = client_of(server)
    await client.responses.create(model="tiny", input="hi")
    with pytest.raises(openai.RateLimitError, match="at most 1500 are allowed .responses.max_tenant_mib") as error:
        await client.responses.create(model="tiny", input="hi", stream=True)
    assert error.value.code == "responses_quota_exceeded"
    await until(lambda: server.generator.live == 0)
    assert (await client.responses.create(model="tiny", input="hi", store=False)).output_text == "Hello."


async def test_without_its_database_a_request_says_so(tmp_path: Path):
    (tmp_path / "file").touch()
    server = Server(*said("Hello."), text=ByteText(), responses=ResponsesConfig(url=f"sqlite:///{tmp_path}/file/x.db"))
    with pytest.raises(openai.InternalServerError, match="The responses store cannot be opened") as error:
        await client_of(server).responses.create(model="tiny", input="hi")
    assert (error.value.status_code, error.value.code) == (503, "responses_store_unavailable")
    assert server.generator.live == 0
    assert (await client_of(server).responses.create(model="tiny", input="hi", store=False)).output_text == "Hello."


async def test_a_client_that_leaves_cancels_its_response(cluster):
    server = await cluster.ingress(b"abc", None)
    body = json.dumps({"model": "tiny", "input": "hi", "stream": True}).encode()
    client = RawClient(server.app, body, "/v1/responses")
    await client.arrived.wait()
    created = json.loads(client.sent[1]["body"].split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
    client.gone.set()
    await client.task
    assert server.generator.live == 0
    assert (await ended(client_of(server), created)).status == "cancelled"


async def test_a_background_response_is_polled_from_any_ingress(cluster):
    go = asyncio.Event()
    one, two = await cluster.ingress(b"He", go, *said("llo.")), await cluster.ingress()
    created = await client_of(one).responses.create(model="tiny", input="hi", background=True)
    assert (created.status, created.background, created.output) == ("queued", True, [])
    assert (await client_of(two).responses.retrieve(created.id)).status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError, match="only a completed or incomplete one can be continued"):
        await client_of(two).responses.create(model="tiny", input="hi", previous_response_id=created.id)
    go.set()
    done = await ended(client_of(two), created.id)
    assert (done.status, done.output_text) == ("completed", "Hello.")
    with pytest.raises(openai.BadRequestError, match="The response is completed: it cannot be cancelled"):
        await client_of(two).responses.cancel(created.id)


async def test_cancel_works_from_any_ingress(cluster):
    one, two = await cluster.ingress(b"He", None), await cluster.ingress()
    created = await client_of(one).responses.create(model="tiny", input="hi", background=True)
    assert one.generator.live == 1
    cancelled = await client_of(two).responses.cancel(created.id)
    assert cancelled.status == "cancelled"
    await until(lambda: one.generator.live == 0)
    assert (await client_of(one).responses.retrieve(created.id)).status == "cancelled"
    assert (await client_of(one).responses.cancel(created.id)).status == "cancelled"


async def test_delete_ends_what_runs(cluster):
    one, two = await cluster.ingress(b"He", None), await cluster.ingress()
    created = await client_of(one).responses.create(model="tiny", input="hi", background=True)
    await client_of(two).responses.delete(created.id)
    await until(lambda: one.generator.live == 0)


async def test_only_a_background_response_can_be_cancelled_or_streamed_later(cluster):
    client = client_of(await cluster.ingress(*said("Hello.")))
    created = await client.responses.create(model="tiny", input="hi")
    with pytest.raises(openai.BadRequestError, match="created with background=true can be cancelled"):
        await client.responses.cancel(created.id)
    with pytest.raises(openai.BadRequestError, match="background=true and stream=true can be streamed"):
        await client.responses.retrieve(created.id, stream=True)


async def test_events_of_a_background_response_are_read_from_any_number_on(cluster):
    one, two = await cluster.ingress(*said("Hello, you.")), await cluster.ingress()
    stream = await client_of(one).responses.create(model="tiny", input="hi", background=True, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "Hello, you."
    assert [event.sequence_number for event in events] == list(range(len(events)))
    response_id = events[0].response.id
    for after in (0, 4, len(events) - 2, len(events) - 1):
        later = await client_of(two).responses.retrieve(response_id, stream=True, starting_after=after)
        assert [event async for event in later] == events[after + 1 :]
    assert (await client_of(two).responses.retrieve(response_id)).output_text == "Hello, you."
    for query, param in (("stream=true&starting_after=x", "starting_after"), ("stream=maybe", "stream")):
        wrong = await two.http.get(f"/v1/responses/{response_id}?{query}")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)


async def test_a_response_whose_ingress_died_is_run_again(cluster):
    dead = await cluster.ingress(b"He", None, starts=False)
    with brief_leases():
        created = await client_of(dead).responses.create(
            model="tiny", input="hi", background=True, instructions="Be kind.", metadata={"a": "b"}
        )
    alive = await cluster.ingress(*said("Hello again."))
    done = await ended(client_of(alive), created.id)
    assert (done.status, done.output_text) == ("completed", "Hello again.")
    assert (done.id, done.created_at, done.metadata) == (created.id, created.created_at, {"a": "b"})
    assert prompt_of(alive) == prompt_of(dead)


async def test_a_response_that_clients_have_begun_to_read_fails_with_its_ingress(cluster):
    dead = await cluster.ingress(b"He", None, starts=False)
    body = json.dumps({"model": "tiny", "input": "hi", "stream": True, "background": True}).encode()
    with brief_leases():
        reader = RawClient(dead.app, body, "/v1/responses")
        await until(lambda: any(b"response.created" in message.get("body", b"") for message in reader.sent))
    alive = await cluster.ingress(*said("Hello again."))
    await reader.task
    told = b"".join(message.get("body", b"") for message in reader.sent)
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith(b"data: ")]
    assert events[-1]["type"] == "response.failed" and events[-1]["response"]["status"] == "failed"
    assert "process that ran this response is gone" in events[-1]["response"]["error"]["message"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert alive.generator.requests == []
    found = await client_of(alive).responses.retrieve(events[0]["response"]["id"])
    assert found.status == "failed" and found.error.code == "server_error"


async def test_an_ingress_that_is_stopped_gives_its_responses_up(cluster):
    stopped = await cluster.ingress(b"He", None, starts=False)
    async with running(stopped):
        created = await client_of(stopped).responses.create(model="tiny", input="hi", background=True)
    assert stopped.generator.live == 0
    alive = await cluster.ingress(*said("Hello again."))
    assert (await ended(client_of(alive), created.id)).output_text == "Hello again."


async def test_a_drain_that_is_over_gives_responses_up_too(cluster):
    drained = await cluster.ingress(b"He", ServerStopped("the drain is over"))
    created = await client_of(drained).responses.create(model="tiny", input="hi", background=True)
    # It may be the same one that takes it up again: then it is stopped again.
    await until(lambda: len(drained.generator.requests) > 1)
    drained.generator.script = said("Hello again.")
    assert (await ended(client_of(drained), created.id)).output_text == "Hello again."


async def test_a_request_that_ends_every_ingress_is_given_up(cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service, "MAX_ATTEMPTS", 0)
    dead = await cluster.ingress(b"He", None, starts=False)
    with brief_leases():
        created = await client_of(dead).responses.create(model="tiny", input="hi", background=True)
    alive = await cluster.ingress(*said("Hello again."))
    done = await ended(client_of(alive), created.id)
    assert done.status == "failed" and "process that ran this response is gone" in done.error.message
    assert alive.generator.requests == []


async def test_a_response_that_no_engine_takes_waits_for_one(cluster):
    dead = await cluster.ingress(b"He", None, starts=False)
    with brief_leases():
        created = await client_of(dead).responses.create(model="tiny", input="hi", background=True)
    alive = await cluster.ingress(Overloaded("the queue is full", retry_after=0.1))
    await until(lambda: len(alive.generator.requests) > 2)
    alive.generator.script = said("Hello again.")
    assert (await ended(client_of(alive), created.id)).output_text == "Hello again."


class SlowStore:
    """Takes events when it is let, and fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.asked = 0
        self.rows: list[tuple[int, int, bytes]] = []
        self.may_go_on = asyncio.Event()
        self._failures = failures

    async def publish(self, response_id: str, first: int, last: int, data: bytes) -> bool:
        self.asked += 1
        await self.may_go_on.wait()
        if self.asked <= self._failures:
            raise StoreUnavailable("not now")
        self.rows.append((first, last, data))
        return True


async def test_events_are_published_in_their_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "PUBLISH_EVERY_S", 0.0)
    store = SlowStore()
    publisher = background.Publisher(cast(Any, store), "resp_1")
    publisher.add(b"a\n\n")
    await until(lambda: store.asked == 1)
    publisher.add(b"b\n\nc\n\n")
    last = asyncio.create_task(publisher.flush())
    await asyncio.sleep(0)
    assert store.asked == 1, "the end of a response must wait for what is on its way"
    store.may_go_on.set()
    await last
    await publisher.aclose()
    assert store.rows == [(0, 0, b"a\n\n"), (1, 2, b"b\n\nc\n\n")]


async def test_events_that_the_store_did_not_take_are_published_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "PUBLISH_EVERY_S", 0.0)
    store = SlowStore(failures=2)
    store.may_go_on.set()
    publisher = background.Publisher(cast(Any, store), "resp_1")
    publisher.add(b"a\n\n")
    await until(lambda: store.asked >= 2)
    assert publisher.has_published, "the store may have taken it all the same"
    publisher.add(b"b\n\n")
    await until(lambda: bool(store.rows))
    await publisher.flush()
    await publisher.aclose()
    assert b"".join(data for _, _, data in store.rows) == b"a\n\nb\n\n"
    assert (store.rows[0][0], store.rows[-1][1]) == (0, 1)
