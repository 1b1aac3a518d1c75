"""Options of prompts, texts and answers that are not about sampling: stop reasons, token ids, truncation, intervals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta
from tests.support.openai_fakes import ByteText, Server, ended, sse, usage


class FramedText(ByteText):
    """Puts byte 1 before a prompt, as others put BOS."""

    def encode(self, prompt: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return [1] * add_special_tokens + super().encode(prompt)


def choices(events: list[Any], name: str) -> list[Any]:
    return [event["choices"][0].get(name, "none") for event in events if event["choices"]]


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_the_reason_of_a_stop_is_in_every_choice(kind: str) -> None:
    server = Server(b"one two", ended())
    ask = getattr(server, kind)
    for fields, expected in (({"stop": ["t"]}, ("stop", "t")), ({}, ("stop", None))):
        choice = (await ask(**fields)).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == expected
        last = sse(await ask(**fields, stream=True))[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == expected


async def test_options_of_the_text_reach_it() -> None:
    server = Server()
    flags = {
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "ignore_eos": True,
    }
    assert (await server.complete(**flags, max_tokens=2)).status_code == 200
    params = server.generator.requests[0].params
    assert params == SamplingParams(**flags, max_tokens=2, seed=params.seed)


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_a_seed_is_drawn_for_each_prompt(kind: str) -> None:
    server = Server()
    for _ in range(2):
        await getattr(server, kind)(max_tokens=1)
    await server.complete(prompt=["a", "b"], max_tokens=1)
    seeds = {asked.params.seed for asked in server.generator.requests}
    assert None not in seeds and len(seeds) == 4


@pytest.mark.parametrize(
    ("kind", "given", "framed"),
    [
        ("chat", None, False),
        ("chat", False, False),
        ("chat", True, True),
        ("complete", None, True),
        ("complete", False, False),
        ("complete", True, True),
    ],
)
async def test_special_tokens_around_a_prompt(kind: str, given: bool | None, framed: bool) -> None:
    server = Server(text=FramedText())
    assert (await getattr(server, kind)(add_special_tokens=given, max_tokens=1)).status_code == 200
    prompt_ids = server.generator.requests[0].prompt_ids
    assert (prompt_ids[0] == 1) == framed and bytes(prompt_ids[framed:]).startswith(b"user: hi" * (kind == "chat"))


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"truncate_prompt_tokens": 3}, b"pqr"),
        ({"truncate_prompt_tokens": 1, "prompt": [97, 98]}, b"b"),
        ({"truncate_prompt_tokens": 50}, b"abcdefghijklmnopqr"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 60}, b"opqr"),
        # Without max_tokens 16 of the model's 64 tokens are for the completion.
        ({"truncate_prompt_tokens": -1, "prompt": "x" * 30 + "y" * 48}, b"y" * 48),
    ],
    ids=str,
)
async def test_a_prompt_is_cut_to_its_last_tokens(fields: dict[str, Any], left: bytes) -> None:
    server = Server()
    response = await server.complete(**{"prompt": "abcdefghijklmnopqr", "echo": True, "max_tokens": None, **fields})
    assert response.status_code == 200
    assert bytes(server.generator.requests[0].prompt_ids) == left
    assert response.json()["choices"][0]["text"].startswith(left.decode()), "what is echoed is what was asked"


async def test_a_chat_is_cut_too_and_what_is_too_long_is_refused() -> None:
    server = Server()
    assert (await server.chat(truncate_prompt_tokens=4, max_tokens=1)).status_code == 200
    assert bytes(server.generator.requests[0].prompt_ids) == b"hi\n>"
    for value, sentence in ((0, "must be -1 or at least 1, got 0"), (-2, "must be an integer from -1")):
        error = (await server.chat(truncate_prompt_tokens=value)).json()["error"]
        assert error["param"] == "truncate_prompt_tokens" and sentence in error["message"]
    error = (await server.complete(prompt="x" * 90, truncate_prompt_tokens=80)).json()["error"]
    assert error["code"] == "context_length_exceeded"


async def test_token_ids_of_completions() -> None:
    server = Server(b"ab", b"c", ended())
    body = (await server.complete(prompt=["hi", "you"], return_token_ids=True)).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [[97, 98, 99, 256]] * 2
    assert [bytes(choice["prompt_token_ids"]) for choice in body["choices"]] == [b"hi", b"you"]
    events = sse(await server.complete(return_token_ids=True, stream=True))
    assert choices(events, "token_ids") == [[97, 98], [99], [256]]
    assert choices(events, "prompt_token_ids") == [[104, 105], "none", "none"]
    assert "token_ids" not in (await server.complete()).text


async def test_token_ids_of_a_chat() -> None:
    server = Server(b"ab", ended(b"c"))
    prompt = list(b"user: hi\n>")
    body = (await server.chat(return_token_ids=True)).json()
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == (prompt, [97, 98, 99, 256])
    events = sse(await server.chat(return_token_ids=True, stream=True, n=2, stream_options={"include_usage": True}))
    assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
    own = [event["choices"][0] for event in events if event["choices"]]
    assert [one.get("token_ids") for one in own if one["index"] == 1] == [None, [97, 98], [99, 256]]
    assert "token_ids" not in (await server.chat()).text


async def test_tokens_without_text_are_returned_in_a_stream() -> None:
    server = Server(b"\xc3", b"\xa9", ended())
    events = sse(await server.complete(return_token_ids=True, stream=True))
    assert [(one["choices"][0]["text"], one["choices"][0]["token_ids"]) for one in events] == [
        ("", [0xC3]),
        ("\u00e9", [0xA9]),
        ("", [256]),
    ]
    assert [event["choices"][0]["text"] for event in sse(await server.complete(stream=True))] == ["\u00e9", ""]


async def test_tokens_up_to_a_stop_string_are_returned() -> None:
    server = Server(b"ab", TokenDelta("", [99, 100], None), b"x")
    choice = (await server.complete(return_token_ids=True, stop=["c"])).json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("ab", [97, 98, 99, 100]), "this text counts whole deltas"


async def test_prompts_that_come_back_have_a_limit() -> None:
    server = Server(max_body_bytes=1000)
    for field in ("echo", "return_token_ids"):
        response = await server.complete(prompt="x" * 40, n=30, max_tokens=1, **{field: True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert (await server.complete(prompt="x" * 40, n=3, max_tokens=1, return_token_ids=True)).status_code == 200


async def test_usage_so_far_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = sse(await Server(b"ab", b"c", ended()).complete(stream=True, stream_options=options))
    assert [event["usage"] for event in events] == [usage(2, 2), usage(2, 3), usage(2, 4), usage(2, 4)]
    chat = sse(await Server(b"ab", ended()).chat(stream=True, stream_options=options))
    assert [event["usage"] and event["usage"]["completion_tokens"] for event in chat] == [None, 2, 3, 3]
    error = (await Server().chat(stream=True, stream_options={"continuous_usage_stats": True})).json()["error"]
    assert error["param"] == "stream_options.continuous_usage_stats" and "include_usage=true" in error["message"]


async def test_chunks_of_several_tokens() -> None:
    server = Server(b"a", b"b", b"c", b"d", b"e", b"f", ended())
    events = sse(await server.complete(stream=True, stream_interval=3, return_token_ids=True))
    assert choices(events, "text") == ["a", "bcd", "ef"]
    assert [len(ids) for ids in choices(events, "token_ids")] == [1, 3, 3]
    assert choices(sse(await server.complete(stream=True, stream_interval=100)), "text") == ["a", "bcdef"]
    assert choices(sse(await server.complete(stream=True, stream_interval=1)), "text")[:2] == ["a", "b"]


async def test_choices_have_intervals_of_their_own() -> None:
    events = sse(await Server().complete(stream=True, stream_interval=3, n=2, max_tokens=5, seed=0))
    texts: dict[int, list[str]] = {0: [], 1: []}
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]].append(choice["text"])
    assert texts == {0: ["a", "bcd", "e"], 1: ["b", "cde", "f"]}


async def test_what_an_interval_held_back_comes_before_an_error() -> None:
    response = await Server(b"a", b"b", RuntimeError("gone")).complete(stream=True, stream_interval=5)
    first, second, error = sse(response)
    assert [one["choices"][0]["text"] for one in (first, second)] == ["a", "b"] and "error" in error


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"stream_interval": 0, "stream": True}, "stream_interval", "must be an integer from 1"),
        ({"stream_interval": 2}, "stream_interval", "only allowed together with stream=true"),
        ({"return_token_ids": "yes"}, "return_token_ids", "boolean"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens", "integer"),
        ({"max_tokens": -1}, "max_tokens", "got -1"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object, got [1]"),
        ({"logit_bias": {"the": 1}}, "logit_bias", 'must name tokens by their ids, such as "50256", got "the"'),
        ({"logit_bias": {" 1": 1}}, "logit_bias", "must name tokens by their ids"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "must name tokens by their ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "must name tokens by their ids"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias", "must be an integer from 0 to 2147483647"),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias", "names the token 1 twice"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "must be a number in [-100, 100], got 101"),
        ({"logit_bias": {"1": None}}, "logit_bias", "must be a number in [-100, 100], got None"),
        ({"typical_p": 0}, "typical_p", "must be a number in (0, 1], got 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens is 9, more than the 8 of max_tokens"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids[0]", "integer"),
        ({"bad_words": [""]}, "bad_words", "must hold non-empty strings"),
        ({"bad_words": [5]}, "bad_words[0]", "string"),
        ({"logits_processors": [{"qualname": "a.b"}]}, "logits_processors[0]", "string"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_wrong_options(kind: str, fields: dict[str, Any], param: str, sentence: str) -> None:
    server = Server()
    response = await getattr(server, kind)(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and sentence in error["message"], error
    assert server.generator.requests == []


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"n": 1, "best_of": 3}], ids=json.dumps)
async def test_the_prompt_alone_comes_back_without_a_token(fields: dict[str, Any]) -> None:
    server = Server()
    n = fields.get("n", 1)
    body = (await server.complete(prompt=["hi", "you"], echo=True, max_tokens=0, **fields)).json()
    assert [choice["text"] for choice in body["choices"]] == ["hi"] * n + ["you"] * n
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"] == usage(5, 0)
    assert server.generator.requests == [], "nothing is computed for it"


async def test_the_prompt_alone_as_a_stream() -> None:
    events = sse(await Server().complete(echo=True, max_tokens=0, stream=True, return_token_ids=True))
    assert choices(events, "text") == ["hi"] and choices(events, "token_ids") == [[]]
    assert choices(events, "prompt_token_ids") == [[104, 105]]
