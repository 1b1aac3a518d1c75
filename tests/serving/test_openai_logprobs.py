"""Log probabilities in answers: OpenAI's shapes on both routes, vLLM's of prompts, whole and streamed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI

from raylm.core.step import Logprobs, TokenDelta
from raylm.errors import RequestRejected
from tests.support.openai_fakes import END, Server, sse

Top = Sequence[tuple[int | str, float]]


def told(*tokens: tuple[float, int, Top]) -> Logprobs:
    """(log probability, rank, likeliest tokens) of each token."""
    ids = [[ord(token) if isinstance(token, str) else token for token, _ in top] for _, _, top in tokens]
    values = [[value for _, value in top] for _, _, top in tokens]
    return Logprobs([value for value, _, _ in tokens], [rank for _, rank, _ in tokens], ids, values)


A = (-0.5, 1, [("a", -0.5), ("z", -1.5)])
B = (-2.0, 3, [("x", -0.25), ("y", -1.0)])
STOP = (-0.125, 1, [(END, -0.125), ("q", -3.0)])


def said(text: str, *tokens: tuple[float, int, Top], number: int = 0, prompt: Logprobs | None = None) -> TokenDelta:
    return TokenDelta(str(number), list(text.encode()), None, None, 0, told(*tokens), prompt)


def last(token: tuple[float, int, Top] = STOP, number: int = 0) -> TokenDelta:
    return TokenDelta(str(number), [END], "stop", None, 0, told(token))


def one(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


CONTENT = [
    {**one("a", -0.5), "top_logprobs": [one("a", -0.5), one("z", -1.5)]},
    {**one("b", -2.0), "top_logprobs": [one("x", -0.25), one("y", -1.0)]},
    {**one("<end>", -0.125), "top_logprobs": [one("<end>", -0.125), one("q", -3.0)]},
]
LISTS = {
    "text_offset": [0, 1, 2],
    "token_logprobs": [-0.5, -2.0, -0.125],
    "tokens": ["a", "b", "<end>"],
    "top_logprobs": [{"a": -0.5, "z": -1.5}, {"x": -0.25, "y": -1.0, "b": -2.0}, {"<end>": -0.125, "q": -3.0}],
}


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://raylm/v1", api_key="none", http_client=server.http, max_retries=0)


async def test_chat_through_the_client() -> None:
    server = Server(said("a", A), said("b", B), last())
    async with client_of(server) as client:
        body = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
        )
    found = body.choices[0].logprobs
    assert found is not None and found.content is not None and found.refusal is None
    assert [entry.model_dump() for entry in found.content] == CONTENT
    assert server.generator.requests[0].params.logprobs == 2


async def test_completions_through_the_client() -> None:
    server = Server(said("a", A), said("b", B), last())
    async with client_of(server) as client:
        body = await client.completions.create(model="tiny", prompt="hi", logprobs=2)
    found = body.choices[0].logprobs
    assert found is not None and found.model_dump() == LISTS


async def test_streams_have_the_same_entries_with_the_text_that_they_are_of() -> None:
    script = (said("a", A), said("b", B), last())
    chat = [
        event["choices"][0] for event in sse(await Server(*script).chat(logprobs=True, top_logprobs=2, stream=True))
    ]
    assert [choice["logprobs"] and choice["logprobs"]["content"] for choice in chat[1:]] == [
        [entry] for entry in CONTENT
    ]
    assert [choice["delta"]["content"] for choice in chat] == ["", "a", "b", ""]
    text = [event["choices"][0] for event in sse(await Server(*script).complete(logprobs=2, stream=True))]
    for name, values in LISTS.items():
        assert [choice["logprobs"][name] for choice in text] == [[value] for value in values]
    joined = [
        event["choices"][0] for event in sse(await Server(*script).complete(logprobs=2, stream=True, stream_interval=9))
    ]
    assert joined[-1]["logprobs"]["tokens"] == ["b", "<end>"]


@pytest.mark.parametrize(
    ("kind", "fields", "asked"),
    [
        ("chat", {"logprobs": True}, (0, None)),
        ("chat", {"logprobs": False, "top_logprobs": 0}, (None, None)),
        ("complete", {"logprobs": 0}, (0, None)),
        ("complete", {"logprobs": False}, (None, None)),
        ("complete", {"logprobs": 3, "echo": True}, (3, 3)),
        ("complete", {"logprobs": 3, "echo": True, "prompt_logprobs": 5}, (3, 5)),
        ("complete", {"logprobs": 3, "echo": True, "prompt_logprobs": -1}, (3, -1)),
        ("chat", {"prompt_logprobs": 0}, (None, 0)),
        ("complete", {"best_of": 3, "logprobs": 2}, (2, None)),
    ],
)
async def test_what_the_engine_is_asked(
    kind: str, fields: dict[str, Any], asked: tuple[int | None, int | None]
) -> None:
    server = Server(said("a", A, number=0), *(last(number=number) for number in range(3)))
    assert (await getattr(server, kind)(**fields)).status_code == 200
    params = server.generator.requests[0].params
    assert (params.logprobs, params.prompt_logprobs) == asked


@pytest.mark.parametrize(
    ("kind", "fields", "param", "words"),
    [
        ("chat", {"top_logprobs": 2}, "top_logprobs", "only allowed together with logprobs=true"),
        ("chat", {"logprobs": True, "top_logprobs": -2}, "top_logprobs", "got -2"),
        ("chat", {"logprobs": 2}, "logprobs", "got 2"),
        ("complete", {"logprobs": True}, "logprobs", "got true"),
        ("complete", {"top_logprobs": 2}, "top_logprobs", "not supported"),
        ("complete", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not allowed together with stream"),
        ("complete", {"logprob_token_ids": [1]}, "logprob_token_ids", "only allowed together with logprobs"),
        (
            "complete",
            {"logprob_token_ids": [1], "logprobs": 1, "use_beam_search": True, "n": 2},
            "logprob_token_ids",
            "not allowed together with use_beam_search=true",
        ),
        (
            "complete",
            {"prompt": ["x" * 60] * 4, "prompt_logprobs": 20, "n": 2},
            "prompt_logprobs",
            "prompt_logprobs makes 10080 log probabilities of the prompts' tokens, at most 4096 are allowed",
        ),
    ],
)
async def test_what_is_refused(kind: str, fields: dict[str, Any], param: str, words: str) -> None:
    response = await getattr(Server(max_body_bytes=64 * 1024), kind)(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


async def test_the_engines_limit_is_told_by_the_clients_field() -> None:
    refusal = RequestRejected("logprobs is 30, but at most 20 tokens are reported", param="logprobs")
    error = (await Server(refusal).chat(logprobs=True, top_logprobs=30)).json()["error"]
    assert (error["param"], error["message"]) == ("top_logprobs", f"top_{refusal}")
    error = (await Server(refusal).complete(logprobs=30)).json()["error"]
    assert (error["param"], error["message"]) == ("logprobs", str(refusal))


async def test_bytes_of_a_character_are_told_apart() -> None:
    """A token that is no text by itself is written as its bytes, and comes with the text that it is a part of."""
    first, *_, third = "€".encode()
    tokens = [(-1.0, 2, [(third, -0.5), (first, -1.0)])] + [(-1.0, 1, [])] * 2
    script = [
        TokenDelta("", [byte], None, None, 0, told(token)) for byte, token in zip("€".encode(), tokens, strict=True)
    ]
    choice = (await Server(*script, last()).complete(logprobs=2)).json()["choices"][0]
    assert choice["text"] == "€"
    assert choice["logprobs"]["tokens"] == [r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "<end>"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1]
    assert choice["logprobs"]["top_logprobs"][0] == {r"bytes:\xac": -0.5, r"bytes:\xe2": -1.0}
    content = (await Server(*script, last()).chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content[:2]] == [(r"\xe2", [0xE2]), (r"\x82", [0x82])]
    events = sse(await Server(*script, last()).complete(logprobs=0, stream=True))
    assert [len(event["choices"][0]["logprobs"]["tokens"]) for event in events] == [3, 1]


async def test_equal_texts_keep_the_likeliest() -> None:
    class Twins:
        """Two tokens of the same text."""

        def token_bytes(self, token_id: int) -> bytes:
            return b"a"

    from raylm.generation.listing import TextEntries, TokenNames, _Token

    entries = TextEntries(TokenNames(Twins(), chat=False, as_ids=False))  # type: ignore[arg-type]
    assert entries.encode(_Token(2, -1.5, 2, [1], [-0.5]), 0)[3] == b'{"a":-0.5}'
    by_id = TextEntries(TokenNames(Twins(), chat=False, as_ids=True))  # type: ignore[arg-type]
    assert by_id.encode(_Token(2, -1.5, 2, [1], [-0.5]), 0)[2:] == (
        b'"token_id:2"',
        b'{"token_id:1":-0.5,"token_id:2":-1.5}',
    )


async def test_what_cannot_be_is_written_as_a_number() -> None:
    choice = (await Server(said("a", (-math.inf, 9, [("b", -math.inf)])), last()).complete(logprobs=1)).json()[
        "choices"
    ][0]
    assert choice["logprobs"]["token_logprobs"][0] == -9999.0
    assert choice["logprobs"]["top_logprobs"][0] == {"a": -9999.0, "b": -9999.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_a_stop_string_are_cut_as_its_text_is(stream: bool) -> None:
    """`ByteStream` finds a stop string within one push."""
    script = TokenDelta("", list(b"okEND"), None, None, 0, told(*[(-1.0, 1, [])] * 5))
    response = await Server(script).complete(logprobs=0, stop=["END"], stream=stream)
    choice = sse(response)[-1]["choices"][0] if stream else response.json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ok", "END")
    assert choice["logprobs"]["tokens"] == ["o", "k"]


async def test_an_answer_without_a_token_has_empty_lists() -> None:
    script = TokenDelta("", list(b"END"), None, None, 0, told(*[(-1.0, 1, [])] * 3))
    choice = (await Server(script).complete(logprobs=1, stop=["END"])).json()["choices"][0]
    assert choice["logprobs"] == {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    choice = (await Server(script).chat(logprobs=True, stop=["END"])).json()["choices"][0]
    assert choice["logprobs"] == {"content": [], "refusal": None}


PROMPT = told((-3.0, 4, [("i", -0.5), ("j", -1.0)]))
"""Of the second token of "hi"."""


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_lists_the_prompt_before_the_answer(stream: bool) -> None:
    script = said("a", A, prompt=PROMPT), TokenDelta("1", [ord("b")], None, None, 0, told(B)), last(), last(number=1)
    response = await Server(*script).complete(prompt="hx", logprobs=2, echo=True, n=2, stream=stream)
    found: dict[int, dict[str, Any]] = {}
    for choice in [event["choices"][0] for event in sse(response)] if stream else response.json()["choices"]:
        own = found.setdefault(choice["index"], {"text": "", **{name: [] for name in LISTS}})
        own["text"] += choice["text"]
        for name in LISTS:
            own[name] += choice["logprobs"][name]
    top = {"i": -0.5, "j": -1.0, "x": -3.0}
    for index, letter in enumerate("ab"):
        assert found[index]["text"] == "hx" + letter
        assert found[index]["text_offset"] == [0, 1, 2, 3]
        assert found[index]["tokens"] == ["h", "x", letter, "<end>"]
        assert found[index]["token_logprobs"] == [None, -3.0, LISTS["token_logprobs"][index], -0.125]
        assert found[index]["top_logprobs"] == [None, top, LISTS["top_logprobs"][index], LISTS["top_logprobs"][2]]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_without_text_is_listed(stream: bool) -> None:
    """The prompt is a special token alone, and the first token generated is half of a character."""
    letter = "ü".encode()
    script = [TokenDelta("0", [byte], None, None, 0, told(A)) for byte in letter]
    response = await Server(*script, last()).complete(prompt=[END], logprobs=0, echo=True, stream=stream)
    choices = [event["choices"][0] for event in sse(response)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "ü"
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert tokens == ["<end>", "bytes:\\xc3", "bytes:\\xbc", "<end>"]


async def test_a_choice_that_comes_before_the_first_begins_with_the_prompt_too() -> None:
    """An engine in this process gives whole sequences, the shortest first."""
    second = TokenDelta("1", [ord("b"), END], "stop", None, 0, told(B, STOP))
    first = TokenDelta("0", [ord("a"), END], "stop", None, 0, told(A, STOP), PROMPT)
    choices = (await Server(second, first).complete(prompt="hx", logprobs=2, echo=True, n=2)).json()["choices"]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["h", "x", letter, "<end>"] for letter in "ab"]
    assert [choice["text"] for choice in choices] == ["hxa", "hxb"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone_is_scored(stream: bool) -> None:
    """max_tokens 0 with echo and log probabilities: the engine computes the prompt and generates nothing."""
    server = Server(TokenDelta("", [], "length", None, 0, None, PROMPT))
    response = await server.complete(prompt="hx", logprobs=1, echo=True, max_tokens=0, stream=stream)
    (choice,) = sse(response)[0]["choices"] if stream else response.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hx", "length")
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -3.0],
        "tokens": ["h", "x"],
        "top_logprobs": [None, {"i": -0.5, "x": -3.0}],
    }
    assert server.generator.requests[0].params.max_tokens == 0


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_prompt_logprobs_are_as_vllms(kind: str) -> None:
    fields: dict[str, Any] = (
        {"prompt": "hix"} if kind == "complete" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    server = Server(TokenDelta("", [END], "stop", None, 0, None, _of_prompt(3 if kind == "complete" else 10)))
    body = (await getattr(server, kind)(**fields, prompt_logprobs=1)).json()
    found = body["prompt_logprobs"] if kind == "chat" else body["choices"][0]["prompt_logprobs"]
    prompt_ids = server.generator.requests[0].prompt_ids
    assert found[0] is None and len(found) == len(prompt_ids)
    token = prompt_ids[2]
    assert found[2] == {
        str(token): {"logprob": -3.0, "rank": 4, "decoded_token": chr(token)},
        "106": {"logprob": -0.5, "rank": 1, "decoded_token": "j"},
    }
    assert "prompt_logprobs" not in (await getattr(Server(last()), kind)()).text


def _of_prompt(num_tokens: int) -> Logprobs:
    return told(*[(-3.0, 4, [("j", -0.5), ("k", -1.0)])] * (num_tokens - 1))


async def test_a_prompt_of_one_token_follows_nothing() -> None:
    choice = (await Server(last()).complete(prompt=[104], prompt_logprobs=1, echo=True, logprobs=1)).json()["choices"][
        0
    ]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["tokens"] == ["h", "<end>"]


async def test_given_tokens_take_the_place_of_the_likeliest() -> None:
    server = Server(said("a", (-0.5, 1, [("x", -4.0), ("y", -5.0)])), last())
    body = (await server.chat(logprobs=True, logprob_token_ids=[120, 121], return_tokens_as_token_ids=True)).json()
    entry = body["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == ("token_id:97", [97])
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
        ("token_id:120", -4),
        ("token_id:121", -5),
    ]
    assert server.generator.requests[0].params.logprob_token_ids == (120, 121)


async def test_lines_of_a_stream_stay_whole() -> None:
    """Some readers end a line at U+2028."""
    script = TokenDelta("", list("\u2028".encode()), None, None, 0, told(*[(-1.0, 1, [])] * 3))
    response = await Server(script, last()).complete(logprobs=0, stream=True)
    assert "\u2028" not in response.text
