"""POST /v1/chat/completions/render and /v1/completions/render."""

from __future__ import annotations

from typing import Any

from tests.support.openai_fakes import Server


async def render(server: Server, path: str, **fields: Any) -> Any:
    response = await server.http.post(f"/v1/{path}/render", json={"model": "tiny", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_chat() -> None:
    server = Server()
    messages = [{"role": "user", "content": "hi"}]
    fields = {"max_tokens": 5, "temperature": 0.5, "stop": "x", "seed": 3, "priority": 2, "stream": True}
    body = await render(server, "chat/completions", messages=messages, **fields)
    assert body["text"] == "user: hi\n>" and bytes(body["token_ids"]) == b"user: hi\n>"
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["stop"], sampling["seed"]) == (5, 0.5, ["x"], 3)
    assert (body["model"], body["priority"], body["stream"], body["cache_salt"]) == ("tiny", 2, True, None)
    assert body["request_id"].startswith("chatcmpl-")
    assert server.generator.requests == []


async def test_prompts() -> None:
    server = Server()
    texts = await render(server, "completions", prompt=["hi", "you"], n=2)
    assert [(one["text"], bytes(one["token_ids"]), one["sampling_params"]["n"]) for one in texts] == [
        ("hi", b"hi", 2),
        ("you", b"you", 2),
    ]
    assert len({one["request_id"] for one in texts}) == 2
    (tokens,) = await render(server, "completions", prompt=[104, 105])
    assert (tokens["text"], tokens["token_ids"], tokens["sampling_params"]["max_tokens"]) == (None, [104, 105], 16)
    assert server.generator.requests == []


async def test_what_the_request_would_be_refused_with() -> None:
    for path, fields in (
        ("completions", {"prompt": "x" * 100}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}),
        ("completions", {}),
    ):
        body = {"model": "tiny", **fields}
        server = Server()
        rendered = await server.http.post(f"/v1/{path}/render", json=body)
        asked = await server.http.post(f"/v1/{path}", json=body)
        assert rendered.status_code == 400
        assert rendered.json() == asked.json()
