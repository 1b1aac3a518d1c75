"""max_tokens 0: an answer without tokens."""

from __future__ import annotations

import pytest

from tests.support.openai_fakes import Server, sse, usage


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_chat(field: str) -> None:
    server = Server()
    body = (await server.chat(**{field: 0})).json()
    assert body["choices"][0]["message"]["content"] == "" and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == usage(10, 0)
    assert server.generator.requests == []
    assert (await server.chat(**{field: -1})).status_code == 400


async def test_completions() -> None:
    server = Server()
    body = (await server.complete(max_tokens=0, n=2)).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [("", "length")] * 2
    events = sse(await server.complete(max_tokens=0, stream=True))
    assert [event["choices"][0]["finish_reason"] for event in events] == ["length"]
    assert server.generator.requests == []
