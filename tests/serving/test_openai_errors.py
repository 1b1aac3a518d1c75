"""Every wrong request gets a status, a sentence and a code in OpenAI's format, and never a 500."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.api.protocol import GenerationRequest
from raylm.api.unsupported import OF_CHATS
from raylm.api.unsupported import UNSUPPORTED as UNSUPPORTED_FIELDS
from raylm.core.step import TokenDelta
from raylm.errors import EngineDeadError, EngineStopped, Overloaded, RequestRejected
from tests.support.openai_fakes import Server, ended, sse


def check(response: httpx.Response, status: int, *, code: str | None = None, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["code"] == code
    assert error["param"] == param
    assert response.headers["content-type"] == "application/json"
    message = error["message"]
    assert isinstance(message, str)
    return message


WRONG = [
    ("temperature", -1, "-1"),
    ("temperature", "hot", '"hot"'),
    ("temperature", True, "true"),
    ("temperature", 1e6, "100"),
    ("top_p", 0, "(0, 1]"),
    ("top_p", 1.5, "1.5"),
    ("top_k", -2, "-2"),
    ("top_k", 1.5, "1.5"),
    ("min_p", 2, "[0, 1]"),
    ("frequency_penalty", 2.5, "[-2, 2]"),
    ("frequency_penalty", True, "true"),
    ("presence_penalty", -2.1, "-2.1"),
    ("repetition_penalty", 0, "(0, 2]"),
    ("repetition_penalty", 2.01, "2.01"),
    ("seed", 2**63, str(2**63)),
    ("seed", "x", '"x"'),
    ("seed", 10**4000, "seed"),
    ("n", 0, "0"),
    ("n", 1000, "128"),
    ("n", True, "true"),
    ("max_tokens", -5, "-5"),
    ("max_tokens", "10", '"10"'),
    ("max_tokens", 3.5, "3.5"),
    ("stream", "yes", '"yes"'),
    ("stream", 1, "1"),
    ("stop", "", "non-empty"),
    ("stop", ["x"] * 17, "17"),
    ("stop", {"a": 1}, '{"a": 1}'),
    ("ignore_eos", "no", '"no"'),
    ("stream_options", [], "[]"),
    ("user", "x" * 257, "at most 256"),
    ("user", 5, "5"),
    ("cache_salt", "x" * 257, "at most 256"),
    ("priority", 10**7, "1000000"),
    ("priority", 1.5, "1.5"),
    ("deadline_s", 0, "over 0"),
    ("deadline_s", -2.5, "-2.5"),
    ("deadline_s", "soon", '"soon"'),
    ("queue_timeout_s", 1e9, "604800"),
    ("queue_timeout_s", True, "true"),
    ("use_beam_search", 1, "1"),
    ("early_stopping", "never", '"never"'),
    ("model", 7, "7"),
]


@pytest.mark.parametrize(("name", "value", "quoted"), WRONG, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_wrong_values(kind: str, name: str, value: object, quoted: str) -> None:
    server = Server()
    message = check(await getattr(server, kind)(**{name: value}), 400, param=name)
    assert name in message and quoted in message
    assert server.generator.requests == []


@pytest.mark.parametrize("body", ["stop_token_ids", "stop"])
async def test_wrong_elements_are_named(body: str) -> None:
    message = check(await Server().chat(**{body: [None]}), 400, param=f"{body}[0]")
    assert "null" in message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"role": None, "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "hi"}, {"role": "", "content": "hi"}], "messages[1].role"),
        ([{"role": "r" * 257, "content": "hi"}], "messages[0].role"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 5, "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "hi", "name": 5}], "messages[0].name"),
    ],
)
async def test_wrong_messages(messages: object, param: str) -> None:
    code = "missing_field" if messages == [{"content": "hi"}] else None
    assert param in check(await Server().chat(messages=messages), 400, param=param, code=code)


@pytest.mark.parametrize(
    ("content", "quoted"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://x"}}], "image_url"),
        ([{"type": "text", "text": "hi"}, {"type": "input_audio", "input_audio": {}}], "input_audio"),
        ([{"type": "text"}], "text"),
        (["hi"], "content[0]"),
        (None, "content"),
        (5, "5"),
        ({"a": 1}, "content"),
    ],
)
async def test_contents_that_are_not_text(content: object, quoted: str) -> None:
    message = check(await Server().chat(messages=[{"role": "user", "content": content}]), 400, param="messages")
    assert "messages[0].content" in message and quoted in message


async def test_missing_fields() -> None:
    server = Server()
    for path, body, param in [
        ("/v1/chat/completions", {"model": "tiny"}, "messages"),
        ("/v1/completions", {"model": "tiny"}, "prompt"),
    ]:
        message = check(await server.http.post(path, json=body), 400, code="missing_field", param=param)
        assert message == f"{param} is required"


@pytest.mark.parametrize(
    ("prompt", "param", "quoted"),
    [
        ("", "prompt", "must not be empty"),
        ([], "prompt", "must not be empty"),
        (["x", ""], "prompt[1]", "must not be empty"),
        ([[]], "prompt[0]", "must not be empty"),
        ([[1], []], "prompt[1]", "must not be empty"),
        (None, "prompt", "null"),
        (5, "prompt", "5"),
        ({"a": 1}, "prompt", '{"a": 1}'),
        ([1, "x"], "prompt", '[1] is "x"'),
        ([1, True], "prompt", "[1] is true"),
        ([1.5], "prompt", "[0] is 1.5"),
        (["x", 1], "prompt[1]", "got 1"),
        ([[1], [None]], "prompt[1]", "[0] is null"),
        ([0, 257], "prompt", "257"),
        ([-1], "prompt", "-1"),
        ([10**30], "prompt", "256"),
    ],
)
async def test_wrong_prompts(prompt: object, param: str, quoted: str) -> None:
    assert quoted in check(await Server().complete(prompt=prompt), 400, param=param)
    assert quoted in check(await Server().complete(prompt=prompt, echo=True), 400, param=param)


async def test_too_many_choices() -> None:
    server = Server(max_choices=4)
    assert "6 completions, at most 4" in check(await server.complete(prompt=["x"] * 3, n=2), 400, param="n")
    check(await server.complete(prompt=["x"] * 5), 400, param="prompt")
    assert "best_of=3 make 6" in check(await server.complete(prompt=["x"] * 2, best_of=3), 400, param="best_of")
    assert "6 completions" in check(await server.chat(n=6), 400, param="n")


async def test_prompt_longer_than_the_model() -> None:
    code = "context_length_exceeded"
    for count in (64, 1000):
        response = await Server().complete(prompt="x" * count)
        message = check(response, 400, code=code, param="prompt")
        assert str(count) in message and "64" in message
    response = await Server().chat(messages=[{"role": "user", "content": "x" * 90}])
    check(response, 400, code=code, param="messages")
    assert (await Server().complete(prompt="x" * 63)).status_code == 200


async def test_max_tokens_beyond_the_model() -> None:
    message = check(
        await Server().complete(prompt="x" * 60, max_tokens=5), 400, code="context_length_exceeded", param="max_tokens"
    )
    assert all(number in message for number in ("5", "60", "65", "64"))
    assert (await Server().complete(prompt="x" * 60, max_tokens=4)).status_code == 200
    response = await Server().chat(max_completion_tokens=60)
    check(response, 400, code="context_length_exceeded", param="max_completion_tokens")
    check(await Server().chat(max_completion_tokens=-1), 400, param="max_completion_tokens")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{'a': 1}", "invalid_json"),
        (b'{"temperature": NaN}', "invalid_json"),
        (b'{"temperature": Infinity}', "invalid_json"),
        (b'{"temperature": -Infinity}', "invalid_json"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "invalid_json"),
        (b"[" * 100_000, "too_many_values"),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, "nested_too_deep"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'"model"', "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b'{"model": "\xff"}', "invalid_utf8"),
        (b'{"model": "tiny"} {}', "invalid_json"),
    ],
    ids=lambda value: str(value)[:24],
)
@pytest.mark.parametrize("strict", [False, True])
async def test_malformed_bodies(body: bytes, code: str, strict: bool) -> None:
    response = await Server(strict=strict).http.post("/v1/chat/completions", content=body)
    assert check(response, 400, code=code)


async def test_a_number_beyond_floats() -> None:
    body = b'{"model": "tiny", "prompt": "hi", "temperature": 1e999}'
    response = await Server().http.post("/v1/completions", content=body)
    check(response, 400, param="temperature")


UNSUPPORTED: list[tuple[str, Any, Any]] = [
    ("tools", [{"type": "function", "function": {"name": "f"}}], []),
    ("tool_choice", "auto", "none"),
    ("functions", [{"name": "f"}], []),
    ("function_call", "auto", "none"),
    ("suffix", "end", ""),
    ("audio", {"voice": "x"}, None),
    ("modalities", ["text", "audio"], ["text"]),
]


@pytest.mark.parametrize(("name", "value", "neutral"), UNSUPPORTED, ids=lambda value: str(value)[:16])
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_what_the_engine_cannot_do_is_refused(kind: str, name: str, value: Any, neutral: Any) -> None:
    if kind == "chat" and name in OF_CHATS:
        return
    server = Server(strict=True)
    message = check(await getattr(server, kind)(**{name: value}), 400, code="unsupported_parameter", param=name)
    assert message.startswith(f"{name} is not supported") and json.dumps(value)[:50] in message
    for accepted in (neutral, None):
        assert (await getattr(server, kind)(**{name: accepted}, max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "parts"),
    [
        ({"best_of": 1, "n": 2}, "best_of", ["n (2)", "20", "got 1"]),
        ({"best_of": 0}, "best_of", ["n (1)", "got 0"]),
        ({"best_of": 21}, "best_of", ["20", "got 21"]),
        ({"best_of": 3, "stream": True}, "best_of", ["n (1)", "stream=true", "got 3"]),
        ({"best_of": 17, "use_beam_search": True}, "best_of", ["16", "got 17"]),
        ({"best_of": 0, "use_beam_search": True}, "best_of", ["n (1)", "got 0"]),
        ({"n": 17, "use_beam_search": True}, "n", ["16", "got 17"]),
        ({"n": 0, "use_beam_search": True}, "n", ["1", "got 0"]),
        ({"length_penalty": 11, "use_beam_search": True}, "length_penalty", ["10", "11"]),
        ({"length_penalty": 2}, "length_penalty", ["use_beam_search=true"]),
        ({"early_stopping": True}, "early_stopping", ["use_beam_search=true"]),
    ],
)
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_wrong_numbers_of_candidates(kind: str, fields: dict[str, Any], param: str, parts: list[str]) -> None:
    server = Server()
    message = check(await getattr(server, kind)(**fields), 400, param=param)
    assert param in message and all(part in message for part in parts), message
    assert server.generator.requests == []


async def test_messages_with_more_than_text() -> None:
    messages = [{"role": "assistant", "content": "hi", "audio": {"id": "x"}}]
    check(await Server().chat(messages=messages), 400, code="unsupported_parameter", param="messages[0].audio")
    for name in ("tool_calls", "function_call"):
        messages = [{"role": "assistant", "content": "hi", name: "x"}]
        assert name in check(await Server().chat(messages=messages), 400, param="messages")


async def test_stream_options_need_a_stream() -> None:
    check(await Server().chat(stream_options={"include_usage": True}), 400, param="stream_options")


async def test_unknown_and_double_fields_are_refused_only_when_strict() -> None:
    path = "/v1/completions"
    unknown = b'{"model": "tiny", "prompt": "hi", "best": 1}'
    double = b'{"model": "nobody", "prompt": "hi", "model": "tiny"}'
    for body in (unknown, double):
        assert (await Server().http.post(path, content=body)).status_code == 200
    strict = Server(strict=True)
    check(await strict.http.post(path, content=unknown), 400, code="unknown_field", param="best")
    check(await strict.http.post(path, content=double), 400, code="duplicate_field", param="model")
    assert (await strict.complete(user="me", metadata={"a": "b"})).status_code == 200


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_unknown_model(kind: str) -> None:
    message = check(await getattr(Server(), kind)(model="nobody"), 404, code="model_not_found", param="model")
    assert "'nobody'" in message
    check(await Server().http.get("/v1/models/nobody"), 404, code="model_not_found", param="model")


async def test_a_model_that_is_starting() -> None:
    response = await Server().chat(model="late")
    assert "'late' cannot be asked yet: " in check(response, 503, code="overloaded")
    assert response.headers["retry-after"] == "5"


async def test_routes_and_methods() -> None:
    http = Server().http
    for path in ("/nothing", "/v1", "/v1/chat", "/v1/completions/", "/health/x"):
        assert path in check(await http.get(path), 404, code="not_found")
    response = await http.get("/v1/chat/completions")
    check(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"
    response = await http.post("/v1/models")
    assert "takes GET and HEAD, not POST" in check(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/chat/completions", "/v1/" + "x" * 10_000])
async def test_a_missing_route_says_which_there_are(path: str) -> None:
    message = check(await Server().http.post(path), 404, code="not_found")
    assert message.startswith(f"POST {path[:100]} is not supported; this server has /v1/chat/completions, ")
    assert "/v1/models, /v1/models/{model}, " in message
    assert message.endswith("/health, /ready, /version, /metrics, /load, /state, /, /docs, /openapi.json")


REFUSALS: list[tuple[Any, int, str, str | None]] = [
    (RequestRejected("no such adapter", param="model", code="adapter"), 400, "adapter", None),
    (Overloaded("the queue is full", retry_after=2.5), 503, "overloaded", "3"),
    (Overloaded("the queue is full", retry_after=0.0), 503, "overloaded", "1"),
    (EngineDeadError("the engine died"), 503, "engine_dead", "2"),
    (EngineStopped("the replica's drain is over"), 503, "engine_stopped", "2"),
    (ValueError("secret detail"), 500, "internal_error", None),
]
FAILURES: list[tuple[Any, int, str, str | None]] = [
    (TokenDelta("", [], "error", "out of blocks"), 500, "generation_failed", None),
    (TokenDelta("", [], "deadline", "deadline_s is 2: the time was up"), 504, "deadline_exceeded", None),
]


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after", "stream"),
    [*((*one, stream) for one in REFUSALS for stream in (False, True)), *((*one, False) for one in FAILURES)],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_errors_before_the_answer_has_begun(
    error: Any, status: int, code: str, retry_after: str | None, stream: bool, n: int
) -> None:
    server = Server(error)
    response = await server.chat(stream=stream, n=n)
    message = check(response, status, code=code, param="model" if status == 400 else None)
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in message
    assert server.generator.live == 0


@pytest.mark.parametrize(("error", "code"), [(b"", "engine_dead"), *((one[0], one[2]) for one in FAILURES)])
@pytest.mark.parametrize("n", [1, 2])
async def test_errors_of_a_request_that_was_taken_are_events_of_its_stream(error: Any, code: str, n: int) -> None:
    server = Server(error, EngineDeadError("the engine died"))
    *roles, last = sse(await server.chat(stream=True, n=n))
    assert [event["choices"][0]["delta"]["role"] for event in roles] == ["assistant"] * n
    assert last["error"]["code"] == code
    assert server.generator.live == 0


async def test_an_answer_without_streaming_fails_as_a_whole() -> None:
    check(await Server(b"one", EngineDeadError("the engine died")).chat(), 503, code="engine_dead")
    check(await Server(b"one").chat(), 503, code="engine_dead")


async def test_one_choice_that_fails_ends_the_others() -> None:
    server = Server(b"one", EngineDeadError("the engine died"))
    events = sse(await server.chat(stream=True, n=3))
    assert events[-1]["error"]["code"] == "engine_dead"
    assert server.generator.live == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [*GenerationRequest.model_fields, *UNSUPPORTED_FIELDS, "messages", "prompt", "echo", "other"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3), strict=st.booleans())
async def test_no_body_makes_a_500(path: str, fields: dict[str, Any], strict: bool) -> None:
    server = Server(strict=strict)
    whole = {"model": "tiny", "max_tokens": 2}
    whole |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    response = await server.http.post(path, json=whole | fields)
    assert response.status_code in (200, 400, 404), response.text
    assert response.status_code == 200 or response.json()["error"]["message"]


async def test_long_values_are_cut_in_messages() -> None:
    message = check(await Server(ended()).chat(temperature="x" * 10_000), 400, param="temperature")
    assert len(message) < 300
    response = await Server().chat(model="y" * 10_000)
    assert len(check(response, 404, code="model_not_found", param="model")) < 1100
