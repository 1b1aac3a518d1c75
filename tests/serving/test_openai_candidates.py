"""best_of, beam search, scheduling options, cached tokens and deadlines: what the engine is asked, what comes back."""

from __future__ import annotations

from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from raylm.core.options import RequestOptions
from raylm.core.step import Logprobs, TokenDelta
from tests.support.openai_fakes import END, Server, ended, sse, usage


def plain(*values: float) -> Logprobs:
    """Log probabilities without ranks and other tokens to speak of."""
    return Logprobs(list(values), [1] * len(values), [[] for _ in values], [[] for _ in values])


def said(number: int, text: str, *logprobs: float, cached: int = 0) -> TokenDelta:
    """All that the sequence of this number says, the end-of-sequence token last."""
    return TokenDelta(str(number), [*text.encode(), END], "stop", None, cached, plain(*logprobs))


THREE = (said(0, "ab", -3, -1, -2), said(1, "cdef", -1, -1, -1, -1, -1), said(2, "g", -3, -0.5))
"""Log probabilities a token: -2, -1, -1.75; in all: -6, -5, -3.5."""


async def test_best_of_returns_the_likeliest_a_token_and_counts_all() -> None:
    server = Server(*THREE)
    body = (await server.complete(best_of=3, n=2)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "cdef"), (1, "g")]
    assert body["usage"] == usage(2, 3 + 5 + 2)
    (asked,) = server.generator.requests
    assert (len(asked.request_ids), asked.params.n, asked.params.logprobs) == (3, 3, 0)


async def test_best_of_chooses_for_each_prompt_and_echoes_it() -> None:
    body = (await Server(*THREE).complete(prompt=["x", "y"], best_of=3, echo=True)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "xcdef"), (1, "ycdef")]


async def test_best_of_ignores_what_comes_after_a_stop_string() -> None:
    late = TokenDelta("0", list(b"ok END"), None, None, 0, plain(*[-1.0] * 6))
    server = Server(
        late, said(1, "no", -2, -2, -2), TokenDelta("0", list(b"worse"), None, None, 0, plain(*[-99.0] * 5))
    )
    body = (await server.complete(best_of=2, stop=["END"])).json()
    assert body["choices"][0]["text"] == "ok "
    assert server.generator.aborted == [server.generator.requests[0].request_ids[0]]


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "width", "num"), [({"n": 2}, 2, 2), ({"best_of": 5}, 5, 1), ({"n": 2, "best_of": 4}, 4, 2), ({}, 1, 1)]
)
async def test_beam_search_keeps_the_engines_order(kind: str, fields: dict[str, int], width: int, num: int) -> None:
    server = Server(said(0, "first"), said(1, "second"))
    response = await getattr(server, kind)(
        **fields, use_beam_search=True, length_penalty=0.5, early_stopping=True, max_tokens=9
    )
    choices = response.json()["choices"]
    texts = [choice["message"]["content"] if kind == "chat" else choice["text"] for choice in choices]
    assert texts == ["first", "second"][:num]
    (asked,) = server.generator.requests
    params = asked.params
    assert (params.beam_width, params.n, len(asked.request_ids)) == (width, num, num)
    assert (params.length_penalty, params.early_stopping, params.logprobs) == (0.5, True, None)


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"3": 1}},
        {"allowed_token_ids": [3]},
        {"bad_words": ["a"]},
        {"min_tokens": 1},
        {"logits_processors": ["a"]},
    ],
    ids=str,
)
async def test_a_beam_search_refuses_what_it_would_ignore(kind: str, fields: dict[str, Any]) -> None:
    server = Server()
    response = await getattr(server, kind)(**fields, use_beam_search=True, n=2)
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))
    assert server.generator.requests == []


async def test_a_streamed_beam_search_delivers_at_the_end() -> None:
    events = sse(await Server(said(0, "first"), said(1, "second")).chat(n=2, use_beam_search=True, stream=True))
    choices = [event["choices"][0] for event in events[2:]]
    assert [(choice["index"], choice["delta"]["content"]) for choice in choices] == [(0, "first"), (1, "second")]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


async def test_values_that_ask_for_no_beam_search() -> None:
    server = Server(ended(), strict=True)
    response = await server.chat(use_beam_search=False, length_penalty=1, early_stopping=False)
    assert response.status_code == 200
    assert server.generator.requests[0].params.beam_width == 0


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_scheduling_reaches_the_engine(kind: str) -> None:
    server = Server(ended(), strict=True, user_is_tenant=True)
    fields: dict[str, Any] = {"priority": -3, "deadline_s": 2.5, "queue_timeout_s": 1, "cache_salt": "s"}
    assert (await getattr(server, kind)(**fields, user="anna", n=2)).status_code == 200
    assert server.generator.requests[0].options == RequestOptions(tenant="anna", **fields)
    server = Server(ended())
    assert (await getattr(server, kind)(user="anna")).status_code == 200
    assert server.generator.requests[0].options == RequestOptions(), "any client can write any name"


@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_count_once_a_prompt(stream: bool) -> None:
    server = Server(
        TokenDelta("0", [97], None, None, 4), TokenDelta("1", [98], None, None, 7), said(0, "c"), said(1, "d")
    )
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await server.complete(prompt=["x", "y"], n=2, stream=stream, **options)
    last = sse(response)[-1] if stream else response.json()
    assert last["usage"] == usage(2, 2 * 6, cached=2 * 4)


async def test_cached_tokens_through_the_client() -> None:
    server = Server(said(0, "a", cached=3))
    async with AsyncOpenAI(base_url="http://raylm/v1", api_key="none", http_client=server.http) as client:
        body = await client.completions.create(model="tiny", prompt="x")
    assert body.usage is not None and body.usage.prompt_tokens_details is not None
    assert body.usage.prompt_tokens_details.cached_tokens == 3


LATE = TokenDelta("", [], "deadline", "deadline_s is 2: the time was up after 1 token")


@pytest.mark.parametrize("script", [(LATE,), (b"one", LATE)])
async def test_a_deadline_is_a_504(script: tuple[bytes | TokenDelta, ...]) -> None:
    response = await Server(*script).chat(deadline_s=2)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (504, "timeout_error", "deadline_exceeded")
    assert error["message"] == LATE.message


async def test_a_deadline_in_a_stream_is_an_event() -> None:
    _, first, last = sse(await Server(b"one", LATE).chat(deadline_s=2, stream=True))
    assert first["choices"][0]["delta"]["content"] == "one"
    assert last["error"]["code"] == "deadline_exceeded"


async def test_clients_do_not_try_again_after_a_deadline() -> None:
    server = Server(LATE)
    async with AsyncOpenAI(
        base_url="http://raylm/v1", api_key="none", http_client=server.http, max_retries=3
    ) as client:
        with pytest.raises(APIStatusError) as caught:
            await client.completions.create(model="tiny", prompt="x", extra_body={"deadline_s": 2})
    assert caught.value.status_code == 504
    assert len(server.generator.requests) == 1


async def test_one_of_several_stops_at_its_string_and_the_others_go_on() -> None:
    server = Server(TokenDelta("1", list(b"x END")), b"a", b"b", ended())
    body = (await server.chat(n=3, stop=["END"])).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["ab", "x ", "ab"]
    assert server.generator.aborted == [server.generator.requests[0].request_ids[1]]
    assert server.generator.live == 0
