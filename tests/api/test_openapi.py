"""The OpenAPI document: whole, valid, and true of what the server answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from raylm import __version__
from raylm.api.metrics import HttpMetrics
from raylm.api.openapi import RANGES
from raylm.api.operations import operations
from raylm.config.serving import HttpConfig
from raylm.core.step import Logprobs, TokenDelta
from tests.api.fields_table import bodies
from tests.api.test_chat_pieces import TEMPLATE, TEXT, TOOLS
from tests.api.thinking_models import with_grammars
from tests.support.openai_fakes import Server, said, sse

HI = [{"role": "user", "content": "hi"}]


async def fetched(server: Server | None = None) -> Any:
    response = await (server or Server()).http.get("/openapi.json")
    assert response.status_code == 200
    return response.json()


def inside(value: Any) -> Iterator[Any]:
    yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from inside(one)


async def test_it_is_whole_and_valid() -> None:
    document = await fetched()
    assert document["openapi"] == "3.1.0" and document["info"]["version"] == __version__
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = {one["$ref"] for one in inside(document) if isinstance(one, dict) and "$ref" in one}
    assert references and all(ref.removeprefix("#/components/schemas/") in schemas for ref in references)
    made = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in made]
    assert len(set(names)) == len(names)
    assert all(operation["summary"].endswith(".") and operation["tags"] for operation in made)


async def test_every_operation_is_in_it_but_for_those_that_are_refused() -> None:
    paths = (await fetched())["paths"]
    catalog = Server().catalog
    for operation in operations(catalog, HttpConfig(), HttpMetrics(catalog)):
        path = re.sub(r":path|:\w+", "", operation.path)
        assert (operation.method.lower() in paths.get(path, {})) != operation.is_refused, (operation.method, path)
    assert {"/health", "/version", "/metrics", "/state"} <= paths.keys()


async def test_keys_and_the_errors_that_they_give() -> None:
    paths = (await fetched())["paths"]
    chat = paths["/v1/chat/completions"]["post"]
    assert chat["security"] == [{"bearer": []}, {}]
    assert list(chat["responses"]) == ["200", "400", "401", "403", "404", "413", "429", "500", "503", "504"]
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    assert "security" not in paths["/health"]["get"] and "401" not in paths["/health"]["get"]["responses"]


async def test_fields_that_are_refused_are_not_in_it() -> None:
    document = await fetched()
    catalog = Server().catalog
    for operation in operations(catalog, HttpConfig(), HttpMetrics(catalog)):
        for schema in bodies(document, operation):
            assert operation.about is not None
            assert operation.about.refused.keys() & schema["properties"].keys() == set()


def _values(name: str, limits: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at the borders, and whether they are allowed."""
    step = 1 if name in WHOLE else 1e-3
    if "minimum" in limits:
        yield limits["minimum"], True
        yield limits["minimum"] - step, False
    if "exclusiveMinimum" in limits:
        yield limits["exclusiveMinimum"] + 1e-3, True
        yield limits["exclusiveMinimum"], False
    if "maximum" in limits:
        yield limits["maximum"], True
        yield limits["maximum"] + step, False


WHOLE = {"top_k", "min_tokens", "max_tokens", "max_completion_tokens", "seed", "n", "top_logprobs", "prompt_logprobs"}
WHOLE |= {"stream_interval", "truncate_prompt_tokens", "priority"}


@pytest.mark.parametrize("name", RANGES)
async def test_ranges_are_those_of_the_checks(name: str) -> None:
    needed = {"top_logprobs": {"logprobs": True}, "stream_interval": {"stream": True}}.get(name, {})
    server = Server()
    for value, is_allowed in _values(name, dict(RANGES[name])):
        body = {"model": "tiny", "messages": HI, **needed, name: value}
        error = (await server.http.post("/v1/chat/completions/render", json=body)).json().get("error")
        words = "" if error is None else error["message"]
        # Within its range a value may still be too much together with others.
        is_range = error is not None and " must be " in words and "min_tokens is" not in words
        assert is_range != is_allowed, (value, words)


def answers() -> list[tuple[str, str, dict[str, Any]]]:
    chat, text = {"messages": HI}, {"prompt": "hi"}
    more = {"return_token_ids": True, "timings": True, "logprobs": True, "n": 2}
    return [
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/chat/completions", {**chat, **more, "prompt_logprobs": 1}),
        ("POST", "/v1/completions", text),
        ("POST", "/v1/completions", {**text, **more, "logprobs": 1, "prompt_logprobs": 1}),
        ("POST", "/v1/chat/completions/render", chat),
        ("POST", "/v1/completions/render", text),
        ("POST", "/v1/tokenize", text),
        ("POST", "/v1/tokenize", {**chat, "return_token_strs": True}),
        ("POST", "/v1/detokenize", {"tokens": [104]}),
        ("POST", "/v1/abort", {"request_ids": "a"}),
        ("GET", "/tokenizer_info", {}),
        ("GET", "/v1/models", {}),
        ("GET", "/v1/models/tiny", {}),
        ("GET", "/ping", {}),
        ("GET", "/health", {}),
        ("GET", "/version", {}),
        ("GET", "/state", {}),
        # Errors.
        ("POST", "/v1/chat/completions", {}),
        ("POST", "/v1/completions", {**text, "model": "nobody"}),
        ("GET", "/v1/models/nobody", {}),
    ]


def closed(schema: Any) -> Any:
    """The schema with no other properties than those that it names."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(value) for name, value in schema.items()}
    if "properties" in made:
        made["additionalProperties"] = False
    return made


@pytest.mark.parametrize(("method", "path", "body"), answers(), ids=lambda value: str(value)[:50])
async def test_answers_are_what_it_says(method: str, path: str, body: dict[str, Any]) -> None:
    number = Logprobs([-1.0], [1], [[104, 105]], [[-1.0, -2.0]])
    # The chat's prompt has ten tokens, the text two.
    size = 1 if path == "/v1/completions" else 9
    prompt = Logprobs([-1.0] * size, [1] * size, [[104]] * size, [[-1.0]] * size)
    server = Server(TokenDelta("", [104], "length", None, 0, number, prompt), alone=True)
    document = await fetched(server)
    response = await server.http.request(method, path, json=body or None)
    check(document, method, path, response)


def check(document: Any, method: str, path: str, response: httpx.Response) -> None:
    named = re.sub(r"^/v1/models/.+", "/v1/models/{model}", path)
    known = document["paths"][named][method.lower()]["responses"]
    schema = known[str(response.status_code)]["content"]["application/json"]["schema"]
    holds(document, schema, response.json())


def holds(document: Any, schema: Any, value: Any) -> None:
    """The value is what the schema says, and has nothing that it does not name."""
    whole = closed({**schema, "components": document["components"]})
    jsonschema.Draft202012Validator(whole).validate(value)


@pytest.mark.parametrize("legacy", [False, True])
async def test_events_are_what_it_says(legacy: bool) -> None:
    fields: dict[str, Any] = {"stream": True, "timings": True, "return_token_ids": True, "max_tokens": 200}
    fields["stream_options"] = {"include_usage": True}
    server = Server(*said(TEXT), template=TEMPLATE, max_model_len=4096)
    with_grammars(server)
    document = await fetched(server)
    asked = {"functions": [tool["function"] for tool in TOOLS]} if legacy else {"tools": TOOLS}
    chat = sse(await server.chat(**fields, **asked, n=2))
    text = sse(await server.complete(**fields, n=2))
    for path, events in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        known = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]["x-event"]
        for event in events:
            holds(document, known, event)
    seen = {name for event in chat for choice in event["choices"] for name in choice["delta"]}
    assert {"role", "reasoning", "function_call" if legacy else "tool_calls"} <= seen
