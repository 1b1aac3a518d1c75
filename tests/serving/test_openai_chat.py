"""POST /v1/chat/completions: answers, streams and what reaches the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest
from openai import APIError, AsyncOpenAI, NotFoundError

import raylm
from raylm.config.sampling import SamplingDefaults
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta
from raylm.errors import EngineDeadError
from tests.support.openai_fakes import Server, ended, sse, usage

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def counting() -> AsyncIterator[tuple[Server, AsyncOpenAI]]:
    server = Server()
    async with AsyncOpenAI(
        base_url="http://raylm/v1", api_key="none", http_client=server.http, max_retries=0
    ) as client:
        yield server, client


async def test_answer() -> None:
    server = Server(b"hel", b"lo", ended())
    response = await server.chat()
    body = response.json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"content": "hello", "role": "assistant", "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
            "stop_reason": None,
        }
    ]
    prompt = len("user: hi\n>")
    assert body["usage"] == usage(prompt, 6)
    assert server.generator.aborted == []


async def test_stream() -> None:
    events = sse(await Server(b"hel", b"lo", ended()).chat(stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "hel"}, {"content": "lo"}, {"content": ""}]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "stop"]
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all("usage" not in event for event in events)


async def test_stream_usage() -> None:
    events = sse(await Server(b"hello", ended()).chat(stream=True, stream_options={"include_usage": True}))
    assert [event["usage"] for event in events[:-1]] == [None, None, None]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == usage(10, 6)


async def test_a_token_that_has_no_text_yet_gives_no_chunk() -> None:
    snowman = "\u2603".encode()
    events = sse(await Server(snowman[:1], snowman[1:2], snowman[2:], ended()).chat(stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "\u2603"}, {"content": ""}]


async def test_line_ends_and_quotes_stay_inside_their_event() -> None:
    text = 'a"\\\n\r\u2028\u2029\x85\x00\u2603\U0001f600'
    response = await Server(text.encode(), ended()).chat(stream=True)
    assert len(response.text.splitlines()) == 2 * 4
    assert sse(response)[1]["choices"][0]["delta"]["content"] == text


@pytest.mark.parametrize("reason", ["length", "abort"])
@pytest.mark.parametrize("stream", [False, True])
async def test_finish_reason(reason: str, stream: bool) -> None:
    response = await Server(b"x", TokenDelta("", [ord("y")], reason)).chat(stream=stream)
    last = sse(response)[-1] if stream else response.json()
    assert last["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_engines_request(stream: bool) -> None:
    server = Server(b"one", b" END two", None)
    response = await server.chat(stream=stream, stop="END")
    if stream:
        choices = [event["choices"][0] for event in sse(response)]
        assert "".join(choice["delta"]["content"] for choice in choices) == "one "
        assert choices[-1]["finish_reason"] == "stop"
    else:
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
    assert server.generator.live == 0
    assert len(server.generator.aborted) == 1


async def test_choices_have_their_own_seeds_and_stream_side_by_side() -> None:
    server = Server()
    plain = (await server.chat(n=3, seed=4, max_tokens=2)).json()
    texts = [choice["message"]["content"] for choice in plain["choices"]]
    assert texts == ["ef", "fg", "gh"]
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2]
    assert plain["usage"] == usage(10, 6)
    events = sse(await server.chat(n=3, seed=4, max_tokens=2, stream=True))
    streamed = ["", "", ""]
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert streamed == texts
    roles = [event["choices"][0]["index"] for event in events if "role" in event["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]
    assert [len(asked.request_ids) for asked in server.generator.requests] == [3, 3], "one request a prompt"
    assert len({request_id for asked in server.generator.requests for request_id in asked.request_ids}) == 6


async def test_the_engine_gets_the_seed_and_counts_on_from_it() -> None:
    server = Server()
    await server.chat(n=2, seed=2**63 - 1, max_tokens=1)
    asked = server.generator.requests[0]
    assert (asked.params.seed, asked.params.n, len(asked.request_ids)) == (2**63 - 1, 2, 2)


async def test_sampling_reaches_the_engine() -> None:
    server = Server()
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "ignore_eos": True}
    fields |= {"presence_penalty": -0.5, "frequency_penalty": 2, "repetition_penalty": 1.5}
    fields |= {"typical_p": 0.8, "min_tokens": 2}
    lists: dict[str, list[object]] = {"allowed_token_ids": [1, 2], "bad_words": ["a b"], "logits_processors": ["mine"]}
    bias = {"7": -100, "0": 2.5}
    await server.chat(**fields, **lists, logit_bias=bias, stop=["x", "y"], stop_token_ids=[5], max_completion_tokens=9)
    _, prompt_ids, params, _ = server.generator.requests[0]
    assert bytes(prompt_ids) == b"user: hi\n>"
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.stop, params.stop_token_ids, params.max_tokens, params.n) == (("x", "y"), (5,), 9, 1)
    assert {name: list(getattr(params, name)) for name in lists} == lists
    assert params.logit_bias == ((7, -100.0), (0, 2.5))


async def test_null_means_the_default() -> None:
    server = Server()
    names = ["temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "n", "stream"]
    names += ["best_of", "use_beam_search", "length_penalty", "early_stopping"]
    names += ["presence_penalty", "frequency_penalty", "repetition_penalty", "typical_p", "logit_bias"]
    names += ["allowed_token_ids", "bad_words", "min_tokens", "logits_processors"]
    names += ["include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"]
    names += ["add_special_tokens", "truncate_prompt_tokens", "return_token_ids", "stream_interval"]
    names += ["user", "priority", "deadline_s", "queue_timeout_s", "cache_salt"]
    response = await server.chat(**dict.fromkeys([*names, "stream_options", "max_tokens", "max_completion_tokens"]))
    assert response.status_code == 200
    _, prompt_ids, params, options = server.generator.requests[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params == SamplingParams(max_tokens=64 - len(prompt_ids), seed=params.seed)
    assert options == RequestOptions()


async def test_max_completion_tokens_goes_before_max_tokens() -> None:
    server = Server()
    await server.chat(max_tokens=5, max_completion_tokens=3)
    assert server.generator.requests[0].params.max_tokens == 3


async def test_top_k_of_minus_one_keeps_all() -> None:
    server = Server()
    await server.chat(top_k=-1)
    assert server.generator.requests[0].params.top_k == 0


async def test_developer_is_the_system_and_the_generation_prompt_can_be_left_out() -> None:
    server = Server()
    messages = [{"role": "developer", "content": "be brief"}, {"role": "assistant", "content": "yes"}]
    await server.chat(messages=messages, add_generation_prompt=False)
    assert bytes(server.generator.requests[0].prompt_ids) == b"system: be brief\nassistant: yes\n"


async def test_text_parts_are_joined() -> None:
    server = Server()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await server.chat(messages=[{"role": "user", "content": parts}])
    assert bytes(server.generator.requests[0].prompt_ids) == b"user: a\nb\n>"


async def test_a_long_chat_is_tokenised_all_the_same() -> None:
    server = Server(max_model_len=100_000)
    response = await server.chat(messages=[{"role": "user", "content": "x" * 50_000}], max_tokens=1)
    assert response.json()["usage"]["prompt_tokens"] == 50_000 + len("user: \n>")


@pytest.mark.parametrize("error", [EngineDeadError("the engine died"), RuntimeError("a bug")])
async def test_error_in_the_middle_of_a_stream(error: Exception) -> None:
    response = await Server(b"one", error).chat(stream=True)
    _, first, last = sse(response)
    assert first["choices"][0]["delta"]["content"] == "one"
    code = "engine_dead" if isinstance(error, EngineDeadError) else "internal_error"
    assert last["error"]["code"] == code
    assert ("the engine died" in last["error"]["message"]) == (code == "engine_dead")


async def test_openai_client(counting: tuple[Server, AsyncOpenAI]) -> None:
    _, client = counting
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, seed=0)
    assert answer.choices[0].message.content == "abc"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 3


async def test_openai_client_streams(counting: tuple[Server, AsyncOpenAI]) -> None:
    _, client = counting
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, seed=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks if chunk.choices] == ["", "a", "b", "c"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3


async def test_openai_client_sees_errors(counting: tuple[Server, AsyncOpenAI]) -> None:
    server, client = counting
    with pytest.raises(NotFoundError, match="'nobody' does not exist") as raised:
        await client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
    server.generator.script = [b"one", EngineDeadError("the engine died")]
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(APIError, match="the engine died"):
        async for _ in stream:
            pass


async def test_openai_client_lists_models(counting: tuple[Server, AsyncOpenAI]) -> None:
    _, client = counting
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).created == 1_700_000_000


async def test_a_model_is_found_by_each_of_its_names(counting: tuple[Server, AsyncOpenAI]) -> None:
    server, client = counting
    server.catalog.model = dataclasses.replace(server.catalog.model, aliases=("small", "owner/tiny"))
    assert [model.id async for model in client.models.list()] == ["tiny", "small", "owner/tiny"]
    card = await client.models.retrieve("owner/tiny")
    assert (card.id, card.model_dump()["root"]) == ("owner/tiny", "tiny")
    answers = [
        await client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=1)
        for name in ("tiny", "small", "owner/tiny")
    ]
    assert [answer.model for answer in answers] == ["tiny"] * 3, "an answer has the model's own name"
    metrics = (await server.http.get("/metrics")).text
    assert 'raylm:prompt_tokens_total{model_name="tiny"}' in metrics and 'model_name="small"' not in metrics
    tags = (await server.http.get("/api/tags")).json()["models"]
    assert [tag["name"] for tag in tags] == ["tiny", "small", "owner/tiny"]
    with pytest.raises(NotFoundError, match="'smal' does not exist; this server has 'tiny', 'late', 'small', 'owner/"):
        await client.chat.completions.create(model="smal", messages=MESSAGES)
    profile = await server.http.post("/start_profile", params={"model": "small"})
    assert profile.status_code == 200, profile.text


async def test_answers_and_chunks_say_what_made_them(counting: tuple[Server, AsyncOpenAI]) -> None:
    server, client = counting
    expected = f"raylm-{raylm.__version__}"
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    assert answer.system_fingerprint == expected
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    assert {chunk.system_fingerprint async for chunk in stream} == {expected}
    assert (await server.complete(max_tokens=1)).json()["system_fingerprint"] == expected
    assert {event["system_fingerprint"] for event in sse(await server.complete(stream=True))} == {expected}


async def test_sampling_that_a_request_leaves_open_is_the_models_own() -> None:
    server = Server(ended())
    server.catalog.model = dataclasses.replace(server.catalog.model, sampling=SamplingDefaults(0.2, 0.9, 7, 0.1, 1.2))
    open_fields = {"temperature": None, "top_p": None}
    given = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    for fields in ({}, open_fields, given):
        assert (await server.chat(**fields)).status_code == 200
        assert (await server.complete(**fields)).status_code == 200
    seen = [
        (asked.params.temperature, asked.params.top_p, asked.params.top_k, asked.params.min_p)
        for asked in server.generator.requests
    ]
    assert seen == [(0.2, 0.9, 7, 0.1)] * 4 + [(0.0, 1.0, 0, 0.0)] * 2
    penalties = [asked.params.repetition_penalty for asked in server.generator.requests]
    assert penalties == [1.2] * 4 + [1.0] * 2
