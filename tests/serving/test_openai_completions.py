"""POST /v1/completions: the forms of a prompt, echo, room for tokens."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.openai_fakes import Server, ended, sse, usage


async def test_answer() -> None:
    body = (await Server(b"hello", ended()).complete()).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    ended_well = {"finish_reason": "stop", "logprobs": None, "stop_reason": None}
    assert body["choices"] == [{"index": 0, "text": "hello", **ended_well}]
    assert body["usage"] == usage(2, 6)


async def test_stream() -> None:
    response = await Server(b"hel", b"lo", ended()).complete(stream=True, stream_options={"include_usage": True})
    *events, last = sse(response)
    assert [event["choices"][0]["text"] for event in events] == ["hel", "lo", ""]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert {event["object"] for event in events} == {"text_completion"}
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 8)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [b"hi"]),
        (["hi", "you"], [b"hi", b"you"]),
        ([104, 105], [b"hi"]),
        ([[104, 105], [121]], [b"hi", b"y"]),
    ],
)
async def test_forms_of_a_prompt(prompt: Any, expected: list[bytes]) -> None:
    server = Server()
    body = (await server.complete(prompt=prompt, max_tokens=1)).json()
    assert sorted(bytes(asked.prompt_ids) for asked in server.generator.requests) == sorted(expected)
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_choices_go_prompt_by_prompt_with_the_same_seeds_each() -> None:
    server = Server()
    body = (await server.complete(prompt=["x", "y"], n=2, seed=1, max_tokens=1, echo=True)).json()
    assert [len(asked.request_ids) for asked in server.generator.requests] == [2, 2], "one request a prompt"
    assert [choice["text"] for choice in body["choices"]] == ["xb", "xc", "yb", "yc"]
    assert body["usage"] == usage(2, 4)


@pytest.mark.parametrize("prompt", ["hi", [104, 105]])
async def test_echo(prompt: Any) -> None:
    server = Server(b" the", b"re", ended())
    assert (await server.complete(prompt=prompt, echo=True)).json()["choices"][0]["text"] == "hi there"
    events = sse(await server.complete(prompt=prompt, echo=True, stream=True))
    assert [event["choices"][0]["text"] for event in events] == ["hi the", "re", ""]


async def test_stop_is_looked_for_in_the_completion_only() -> None:
    body = (await Server(b"there", ended()).complete(prompt="hi", echo=True, stop=["hi"])).json()
    assert body["choices"][0]["text"] == "hithere"


async def test_default_max_tokens_is_16_or_what_is_left() -> None:
    server = Server()
    await server.complete(prompt="x" * 10)
    await server.complete(prompt="x" * 60)
    assert [asked.params.max_tokens for asked in server.generator.requests] == [16, 4]


async def test_best_of_n_is_n() -> None:
    for fields in ({"n": 2, "best_of": 2}, {"best_of": 1}, {"n": 2, "best_of": 2, "stream": True}):
        server = Server()
        assert (await server.complete(**fields)).status_code == 200
        assert server.generator.requests[0].params.logprobs is None


async def test_long_texts_are_tokenised_all_the_same() -> None:
    server = Server(max_model_len=100_000)
    body = (await server.complete(prompt=["x" * 15_000, "y" * 15_000], max_tokens=1)).json()
    assert body["usage"]["prompt_tokens"] == 30_000


async def test_openai_client() -> None:
    server = Server()
    async with AsyncOpenAI(base_url="http://raylm/v1", api_key="none", http_client=server.http) as client:
        body = await client.completions.create(model="tiny", prompt=["x", "y"], max_tokens=2, seed=0, echo=True)
        assert [choice.text for choice in body.choices] == ["xab", "yab"]
        stream = await client.completions.create(model="tiny", prompt="x", max_tokens=2, seed=0, stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["a", "b"]
