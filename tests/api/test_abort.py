"""Requests that are ended by their names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.openai_fakes import Server, ended, sse

HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def running(server: Server, count: int = 1) -> None:
    while server.generator.num_deltas < count:
        await asyncio.sleep(0)


async def abort(server: Server, path: str = "/v1/abort", key: str = "", **fields: Any) -> list[str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = await server.http.post(path, json=fields, headers=headers)
    assert response.status_code == 200, response.text
    names: list[str] = response.json()["cancelled_request_ids"]
    return names


@pytest.mark.parametrize(
    ("given", "headers", "path", "fields", "reply_id"),
    [
        ({"request_id": "mine"}, {}, "/v1/abort", {"request_ids": ["other", "mine"]}, "chatcmpl-mine"),
        ({"request_id": "mine"}, {}, "/v1/abort", {"request_ids": "chatcmpl-mine"}, "chatcmpl-mine"),
        ({"request_id": "mine"}, {}, "/abort_requests", {"request_ids": ["mine"]}, "chatcmpl-mine"),
        ({"rid": "mine"}, {}, "/abort_request", {"rid": "mine"}, "mine"),
        ({}, {"x-request-id": "mine"}, "/v1/abort", {"request_ids": ["mine"]}, None),
    ],
)
async def test_an_answer_keeps_what_it_has(
    given: dict[str, Any], headers: dict[str, str], path: str, fields: dict[str, Any], reply_id: str | None
) -> None:
    server = Server(b"one", None)
    asked = asyncio.create_task(server.http.post("/v1/chat/completions", json={**HI, **given}, headers=headers))
    await running(server)
    assert len(await abort(server, path, **fields)) == 1
    body = (await asked).json()
    assert body["choices"][0]["message"]["content"] == "one"
    assert body["choices"][0]["finish_reason"] == "abort"
    assert server.generator.live == 0 and len(server.generator.aborted) == 1
    assert reply_id in (None, body["id"])
    # It has ended: nobody is left to be found.
    assert await abort(server, path, **fields) == []


async def test_all_choices_of_a_stream_end() -> None:
    server = Server(b"one", None)
    asked = asyncio.create_task(server.chat(stream=True, n=3, request_id="mine"))
    await running(server, 3)
    assert await abort(server, request_ids=["mine"]) == ["mine"]
    events = sse(await asked)
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["abort"] * 3
    assert server.generator.live == 0


async def test_a_request_that_waits_in_the_queue() -> None:
    server = Server(b"one", None)
    server.generator.admission = asyncio.Event()
    asked = asyncio.create_task(server.complete(request_id="mine", prompt=["a", "b"]))
    while server.generator.live < 2:
        await asyncio.sleep(0)
    assert await abort(server, request_ids=["mine"]) == ["mine"]
    body = (await asked).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["abort"] * 2
    assert [choice["text"] for choice in body["choices"]] == ["", ""]


async def test_two_of_one_name_end_together_and_get_ids_of_their_own_at_the_engine() -> None:
    server = Server(b"one", None)
    asked = [asyncio.create_task(server.chat(rid="mine")) for _ in range(2)]
    await running(server, 2)
    ids = [name for request in server.generator.requests for name in request.request_ids]
    assert len(set(ids)) == 2
    assert await abort(server, rid="mine") == ["mine"]
    assert [(await one).json()["id"] for one in asked] == ["mine"] * 2


async def test_a_tenant_ends_its_own_requests_only(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    lines = [{"key": name, "tenant": name, "scopes": ["inference"]} for name in ("anna", "ben")]
    file.write_text("\n".join(map(json.dumps, lines)))
    server = Server(b"one", None, api_keys_file=str(file))

    def ask(key: str) -> asyncio.Task[httpx.Response]:
        headers = {"authorization": f"Bearer {key}"}
        body = {**HI, "request_id": "mine"}
        return asyncio.create_task(server.http.post("/v1/chat/completions", json=body, headers=headers))

    anna, ben = ask("anna"), ask("ben")
    await running(server, 2)
    assert await abort(server, key="ben", request_ids=["mine"]) == ["mine"]
    assert (await ben).json()["choices"][0]["finish_reason"] == "abort"
    await asyncio.sleep(0)
    assert not anna.done() and server.generator.live == 1
    assert await abort(server, key="anna", request_ids=["mine"]) == ["mine"]
    await anna


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "request_ids"),
        ({"request_ids": []}, "request_ids"),
        ({"request_ids": [1]}, "request_ids"),
        ({"rid": "", "abort_all": True}, "abort_all"),
        ({"request_ids": ["x"] * 1025}, "request_ids"),
    ],
)
async def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    response = await Server().http.post("/v1/abort", json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)


async def test_names_of_requests() -> None:
    error = (await Server().chat(rid="a", request_id="b")).json()["error"]
    assert error["param"] == "rid"
    assert (await Server(ended(b"x")).complete(request_id="b")).json()["id"] == "cmpl-b"
    assert (await Server(ended(b"x")).chat(request_id="")).json()["id"].startswith("chatcmpl-")


async def test_an_abort_before_the_prompts_log_probabilities() -> None:
    server = Server(None)
    asked = asyncio.create_task(server.complete(request_id="mine", prompt_logprobs=1))
    while server.generator.live < 1:
        await asyncio.sleep(0)
    assert await abort(server, request_ids=["mine"]) == ["mine"]
    assert (await asked).json()["choices"][0]["finish_reason"] == "abort"
