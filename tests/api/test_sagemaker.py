"""/ping and /invocations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.openai_fakes import Server, ended, sse

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping(method: str) -> None:
    server = Server()
    response = await server.http.request(method, "/ping")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    server.catalog.is_ready = False
    assert (await server.http.request(method, "/ping")).status_code == 503


async def test_the_body_says_what_is_asked() -> None:
    server = Server(ended(b"yes"))
    chat = (await server.http.post("/invocations", json={"model": "tiny", "messages": HI})).json()
    assert (chat["object"], chat["choices"][0]["message"]["content"]) == ("chat.completion", "yes")
    text = (await server.http.post("/invocations", json={"model": "tiny", "prompt": "hi"})).json()
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", "yes")
    events = sse(await server.http.post("/invocations", json={"model": "tiny", "messages": HI, "stream": True}))
    assert events[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": "hi"}, "input", "it takes messages (a chat) or prompt (completions)"),
        ({"messages": HI, "prompt": "hi"}, "prompt", "not allowed together with messages"),
        ({}, "messages", "required"),
        ({"prompt": "hi", "suffix": "there"}, "suffix", "suffix is not supported"),
    ],
)
async def test_what_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    response = await Server().http.post("/invocations", json={"model": "tiny", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


async def test_no_json() -> None:
    for body in (b"", b"{", b"[" * 100_000, b'{"messages": [], "messages'):
        response = await Server().http.post("/invocations", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] in ("invalid_json", "too_many_values", "nested_too_deep")
