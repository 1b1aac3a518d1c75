"""When a stream begins, and how it shows that it lives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, InternalServerError

from raylm.api.dialect import OPENAI
from raylm.engine.client import _MAX_UNANSWERED
from raylm.errors import Overloaded
from raylm.serving.sse import EventSender
from tests.support.openai_fakes import RawClient, Server, ended, sse

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
COMPLETION = {"model": "tiny", "prompt": "hi", "stream": True}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

COMMENT = OPENAI.heartbeat


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def bodies(client: RawClient) -> list[bytes]:
    return [message["body"] for message in client.sent if message["type"] == "http.response.body"]


async def leave(client: RawClient) -> None:
    client.gone.set()
    await client.task


@pytest.mark.parametrize("n", [1, 3])
async def test_a_chat_begins_when_the_engine_has_taken_it(n: int) -> None:
    server = Server(None)
    admission = server.generator.admission = asyncio.Event()
    client = RawClient(server.app, json.dumps(CHAT | {"n": n}).encode())
    await until(lambda: server.generator.live == n)
    for _ in range(50):
        await asyncio.sleep(0)
    assert client.sent == [], "it may still be refused with a status of its own"
    admission.set()
    await until(lambda: bodies(client))
    assert client.sent[0]["status"] == 200
    events = [json.loads(event.removeprefix(b"data: ")) for event in bodies(client)[0].split(b"\n\n")[:-1]]
    choices = [event["choices"][0] for event in events]
    assert [choice["index"] for choice in choices] == list(range(n))
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in choices)
    await leave(client)
    assert len(server.generator.aborted) == n


async def test_a_completion_sends_its_headers_when_the_engine_has_taken_it() -> None:
    server = Server(None)
    client = RawClient(server.app, json.dumps(COMPLETION).encode(), path=COMPLETIONS)
    await until(lambda: client.sent)
    assert [message["type"] for message in client.sent] == ["http.response.start"]
    await leave(client)


async def test_all_prompts_of_a_completion_are_taken_before_it_begins() -> None:
    server = Server(b"x", ended())
    server.generator.refused = {2}
    response = await server.complete(prompt=["a", "b", "c"], stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert server.generator.live == 0
    assert len(server.generator.aborted) == 2
    server.generator.refused = set()
    assert len(sse(await server.complete(prompt=["a", "b", "c"], stream=True))) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_many_prompts_leave_room_on_the_way_to_a_busy_engine(stream: bool) -> None:
    server = Server(b"x", ended())
    admission = server.generator.admission = asyncio.Event()
    asking = asyncio.create_task(server.complete(prompt=["a"] * 1024, stream=stream))
    await until(lambda: server.generator.requests)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(server.generator.requests) < _MAX_UNANSWERED / 2, "the engine has taken none of them"
    admission.set()
    response = await asking
    assert response.status_code == 200, response.text
    assert len(server.generator.requests) == 1024
    assert server.generator.live == 0


async def test_a_request_that_is_refused_keeps_its_status() -> None:
    server = Server(Overloaded("the queue is full", retry_after=7))
    async with AsyncOpenAI(
        base_url="http://raylm/v1", api_key="none", http_client=server.http, max_retries=0
    ) as client:
        for create, fields in ((client.chat.completions.create, CHAT), (client.completions.create, COMPLETION)):
            with pytest.raises(InternalServerError, match="the queue is full") as raised:
                await create(**fields)  # type: ignore[operator]
            assert (raised.value.status_code, raised.value.response.headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, COMPLETION)])
async def test_a_silent_stream_sends_comments(path: str, body: dict[str, Any]) -> None:
    server = Server(None, keep_alive_s=0.01)
    client = RawClient(server.app, json.dumps(body).encode(), path=path)
    await until(lambda: bodies(client).count(COMMENT) >= 3)
    await leave(client)
    sent = len(client.sent)
    await asyncio.sleep(0.03)
    assert len(client.sent) == sent, "the timer is gone with the stream"


async def test_a_client_that_does_not_read_is_sent_no_comments() -> None:
    tried: list[bytes] = []
    reads = asyncio.Event()

    async def send(message: Any) -> None:
        tried.append(message["body"])
        await reads.wait()

    async with EventSender(send, keep_alive_s=0, heartbeat=COMMENT) as sender:
        sending = asyncio.create_task(sender.send(b"event"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert tried == [b"event"], "its comment would wait behind it"
        reads.set()
        await sending
        await until(lambda: len(tried) >= 3)
    assert set(tried[1:]) == {COMMENT}


async def test_openais_client_skips_comments() -> None:
    gate = asyncio.Event()
    server = Server(b"one", gate, b"two", ended(), keep_alive_s=0.01)
    seen: list[bytes] = []
    app = server.app

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def note(message: Any) -> None:
            seen.append(message.get("body", b""))
            if seen.count(COMMENT) == 2:
                gate.set()
            await send(message)

        await app(scope, receive, note)

    server.http._transport.app = watched  # type: ignore[attr-defined]
    async with AsyncOpenAI(base_url="http://raylm/v1", api_key="none", http_client=server.http) as client:
        stream = await client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["", "one", "two", ""]
        seen.clear()
        gate.clear()
        completion = await client.completions.create(**COMPLETION)  # type: ignore[call-overload]
        assert [chunk.choices[0].text async for chunk in completion] == ["one", "two", ""]
    assert seen.count(COMMENT) >= 2


@pytest.mark.parametrize("n", [1, 2])
async def test_an_event_costs_no_task(n: int) -> None:
    loop = asyncio.get_running_loop()
    made: list[int] = []

    def count(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        made[-1] += 1
        return asyncio.Task(work, loop=loop, **options)

    loop.set_task_factory(count)
    try:
        for tokens in (2, 400):
            made.append(0)
            client = RawClient(
                Server(max_model_len=1000).app, json.dumps(CHAT | {"n": n, "max_tokens": tokens}).encode()
            )
            await client.task
            assert len(bodies(client)) == 1 + n * tokens + 2
    finally:
        loop.set_task_factory(None)
    assert made[0] == made[1]
