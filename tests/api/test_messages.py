"""Anthropic's API, asked by Anthropic's own client over HTTP and by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from raylm.core.step import TokenDelta
from raylm.errors import EngineDeadError, Overloaded
from tests.api.thinking_models import CALL, OTHER, TEXT, THOUGHT, prompt_of, saying, scripted, with_grammars
from tests.support.live_http import listening
from tests.support.openai_fakes import RawClient, Server, ended, said

TOOLS: list[Any] = [
    {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}},
    {"name": "now", "input_schema": {"type": "object"}},
]
HI: list[Any] = [{"role": "user", "content": "1 + 2?"}]
THINKING: Any = {"type": "enabled", "budget_tokens": 50}
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HI}


@pytest.fixture
def thinker() -> Server:
    return saying(TEXT)


@pytest.fixture
def client(thinker: Server) -> Iterator[Anthropic]:
    with listening(thinker.app) as url, Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def post(server: Server, **fields: Any) -> Any:
    return await server.http.post("/v1/messages", json={**ASKED, **fields})


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; the type in the event's line is that in its data."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        head, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {found[-1]['type']}"
    return found


def check_answer(message: Any) -> None:
    thought, text, add, now = message.content
    assert (thought.type, thought.thinking.strip()) == ("thinking", "I add.")
    assert thought.signature == message.id
    assert (text.type, text.text.strip()) == ("text", "Let me add.")
    assert (add.type, add.name, add.input) == ("tool_use", "add", {"a": 1, "b": 2})
    assert (now.type, now.name, now.input) == ("tool_use", "now", {})
    assert add.id != now.id
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.usage.output_tokens == len(TEXT) + 1
    assert 0 < message.usage.output_tokens_details.thinking_tokens < len(THOUGHT)
    assert message.id.startswith("msg_") and message.role == "assistant" and message.model == "tiny"


def test_a_whole_answer(client: Anthropic, thinker: Server) -> None:
    message = client.messages.create(**ASKED, tools=TOOLS, thinking=THINKING)
    check_answer(message)
    assert message.usage.input_tokens == len(thinker.generator.requests[0].prompt_ids)


def test_a_stream(client: Anthropic) -> None:
    with client.messages.stream(**ASKED, tools=TOOLS, thinking=THINKING) as stream:
        kinds = [event.type for event in stream]
        check_answer(stream.get_final_message())
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)


async def test_the_asynchronous_client(thinker: Server) -> None:
    with listening(thinker.app) as url:
        async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as own:
            check_answer(await own.messages.create(**ASKED, tools=TOOLS, thinking=THINKING))
            async with own.messages.stream(**ASKED, tools=TOOLS, thinking=THINKING) as stream:
                check_answer(await stream.get_final_message())


def test_a_loop_with_tools(client: Anthropic, thinker: Server) -> None:
    first = client.messages.create(**ASKED, tools=TOOLS, thinking=THINKING)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "3"}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    thinker.generator.script = said("It is 3.")
    turns: Any = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = client.messages.create(model="tiny", max_tokens=100, messages=turns, tools=TOOLS)
    assert [block.text for block in last.content if block.type == "text"] == ["It is 3."]
    assert last.stop_reason == "end_turn"
    prompt = prompt_of(thinker, 1)
    assert "tool: 3" in prompt and "I add." in prompt and "'name': 'add'" in prompt


def test_errors_are_the_clients_own(client: Anthropic, thinker: Server) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model="tiny", max_tokens=5, messages=image)
    assert "messages[0].content[0].type" in refused.value.message
    with pytest.raises(anthropic.NotFoundError, match="'huge' does not exist"):
        client.messages.create(model="huge", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.NotFoundError, match="/v1/messages/batches is not supported"):
        client.messages.batches.list()
    thinker.generator.script = [Overloaded("the queue is full", retry_after=1)]
    with pytest.raises(anthropic.InternalServerError, match="the queue is full") as overloaded:
        client.messages.create(**ASKED)
    assert overloaded.value.type == "overloaded_error"


def test_tokens_are_counted(client: Anthropic, thinker: Server) -> None:
    found = client.messages.count_tokens(model="tiny", messages=HI, system="Be kind.", tools=TOOLS, thinking=THINKING)
    client.messages.create(**ASKED, system="Be kind.", tools=TOOLS, thinking=THINKING)
    assert found.input_tokens == len(thinker.generator.requests[0].prompt_ids)
    # Longer than the model: counted all the same.
    long: Any = [{"role": "user", "content": "x" * 9000}]
    assert client.messages.count_tokens(model="tiny", messages=long).input_tokens > 9000


async def test_every_event_of_a_stream() -> None:
    response = await post(saying(TEXT, size=len(TEXT)), tools=TOOLS, thinking=THINKING, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response.text)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    start = events[0]["message"]
    assert (start["type"], start["content"], start["stop_reason"], start["role"]) == ("message", [], None, "assistant")
    assert start["usage"]["input_tokens"] > 0 and start["usage"]["output_tokens"] == 0
    shape = [
        (event["type"].removeprefix("content_block_"), event["index"], event.get("delta", {}).get("type"))
        for event in events[2:-2]
    ]
    begun = [(kind, index) for kind, index, _ in shape if kind != "delta"]
    assert begun == [(kind, index) for index in range(4) for kind in ("start", "stop")]
    kinds = [[kind for _, index, kind in shape if index == number and kind] for number in range(4)]
    assert kinds[0][-1] == "signature_delta" and set(kinds[0][:-1]) == {"thinking_delta"}
    assert set(kinds[1]) == {"text_delta"}
    assert set(kinds[2]) == {"input_json_delta"}
    delta = events[-2]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(TEXT) + 1
    assert events[-1] == {"type": "message_stop"}


@pytest.mark.parametrize("size", [1, 2, 5, 7, 1000])
async def test_a_stream_is_the_whole_answer_however_it_is_cut(size: int) -> None:
    fields = {"tools": TOOLS, "thinking": THINKING}
    whole = (await post(saying(TEXT, size=size), **fields)).json()
    response = await post(saying(TEXT, size=size), **fields, stream=True)
    blocks: dict[int, dict[str, Any]] = {}
    for event in events_of(response.text):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            field = delta["type"].removesuffix("_delta")
            if field == "input_json":
                block["json"] += delta["partial_json"]
            else:
                block[field] += delta[field]
    for block in blocks.values():
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
            block.pop("id")
    expected = [{name: value for name, value in block.items() if name != "id"} for block in whole["content"]]
    own = [*blocks.values()]
    own[0]["signature"] = expected[0]["signature"]
    # What stands between the text and the first call is white space, which a stream cannot know to be the last.
    assert [block.get("text", "").strip() for block in own] == [block.get("text", "").strip() for block in expected]
    assert [{**block, "text": ""} for block in own] == [{**block, "text": ""} for block in expected]


async def test_without_thinking_there_is_none() -> None:
    server = saying(f"{THOUGHT}Three.")
    message = (await post(server)).json()
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["content"][0]["text"].strip() == "Three."
    assert "[False ]" in prompt_of(server)
    assert server.generator.requests[0].params.thinking_token_budget == -1
    response = await post(saying(f"{THOUGHT}Three."), stream=True)
    kinds = {event["delta"]["type"] for event in events_of(response.text) if event["type"] == "content_block_delta"}
    assert kinds == {"text_delta"}


async def test_thinking_is_switched_on_bounded_and_hidden() -> None:
    server = saying(f"{THOUGHT}Three.")
    await post(server, thinking=THINKING, output_config={"effort": "low"})
    assert "[True low]" in prompt_of(server)
    params = server.generator.requests[0].params
    assert params.thinking_token_budget == 50
    assert params.thinking is not None and bytes(params.thinking.begin) == b"<think>"
    hidden = await post(server, thinking={"type": "adaptive", "display": "omitted"})
    block = hidden.json()["content"][0]
    assert (block["type"], block["thinking"]) == ("thinking", "") and block["signature"]
    assert server.generator.requests[1].params.thinking_token_budget == -1


async def test_a_model_that_never_thinks_takes_a_budget() -> None:
    server = Server(*said("Three."), max_model_len=200)
    message = (await post(server, thinking=THINKING)).json()
    assert [block["type"] for block in message["content"]] == ["text"]


async def test_white_space_between_blocks_is_no_block() -> None:
    message = (await post(saying(f"{THOUGHT}{CALL}\n{OTHER}"), tools=TOOLS)).json()
    assert [block["type"] for block in message["content"]] == ["tool_use", "tool_use"]
    response = await post(saying(f"{THOUGHT}{CALL}\n{OTHER}"), tools=TOOLS, stream=True)
    assert "text_delta" not in response.text
    for stream in (False, True):
        assert " \\n" in (await post(saying(" \n"), stream=stream)).text


@pytest.mark.parametrize(
    ("script", "fields", "reason", "sequence"),
    [
        ([b"abc", ended()], {}, "end_turn", None),
        ([b"abc", TokenDelta("", [*b"d"], "length")], {}, "max_tokens", None),
        ([b"abc", TokenDelta("", [*b"d"], "length")], {"max_tokens": 4000}, "model_context_window_exceeded", None),
        ([b"abcSTOPd"], {"stop_sequences": ["STOP"]}, "stop_sequence", "STOP"),
    ],
)
async def test_why_it_stopped(script: list[Any], fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    message = (await post(scripted(*script), **fields)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["content"][0]["text"].startswith("abc")
    delta = events_of((await post(scripted(*script), **fields, stream=True)).text)[-2]["delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


async def test_arguments_that_are_cut_are_closed() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "lo'
    message = (await post(scripted(TokenDelta("", [*text.encode()], "length")), tools=TOOLS)).json()
    assert message["stop_reason"] == "max_tokens"
    assert [block.get("input") for block in message["content"]][-1] == {"a": 1, "b": "lo"}


async def test_sampling_and_the_tenant() -> None:
    server = scripted(b"a", ended(), user_is_tenant=True)
    await post(server, temperature=0.5, top_p=0.25, top_k=7, metadata={"user_id": "me"}, stop_sequences=["x"])
    asked = server.generator.requests[0]
    assert (asked.params.temperature, asked.params.top_p, asked.params.top_k) == (0.5, 0.25, 7)
    assert (asked.params.max_tokens, asked.params.stop, asked.options.tenant) == (100, ("x",), "me")


async def test_cached_tokens_are_no_input_tokens() -> None:
    server = scripted(TokenDelta("", [*b"a"], None, num_cached_tokens=3), ended())
    usage = (await post(server)).json()["usage"]
    num_prompt = len(server.generator.requests[0].prompt_ids)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_prompt - 3, 3)
    assert usage["cache_creation_input_tokens"] == 0


async def test_an_answer_goes_on_from_the_last_message() -> None:
    server = saying("B)")
    messages = [*HI, {"role": "assistant", "content": "It is ("}]
    assert (await post(server, messages=messages)).json()["content"][0]["text"] == "B)"
    assert prompt_of(server).rstrip().endswith("It is (")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", b'{"messages":["x"]}', 400, "invalid_request_error"),
        ("POST", "/v1/messages", b" " * 3000, 413, "request_too_large"),
        ("POST", "/v1/messages/count_tokens", b"{}", 400, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", 404, "not_found_error"),
        ("DELETE", "/v1/messages", b"", 405, "invalid_request_error"),
    ],
)
async def test_errors_have_anthropics_shape(method: str, path: str, body: bytes, status: int, kind: str) -> None:
    server = saying("x", max_body_bytes=2000)
    response = await server.http.request(method, path, content=body, headers={"x-request-id": "req_7"})
    assert response.status_code == status
    found = response.json()
    assert (found["type"], found["error"]["type"], found["request_id"]) == ("error", kind, "req_7")
    assert found["error"]["message"] and found.keys() == {"type", "error", "request_id"}


async def test_keys_come_in_either_header(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    server = saying("x", api_keys_file=str(keys))
    response = await post(server)
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        response = await server.http.post("/v1/messages", json=ASKED, headers=headers)
        assert response.status_code == 200


async def test_an_error_ends_a_stream_as_an_event() -> None:
    response = await post(scripted(b"ab", EngineDeadError("The engine died")), stream=True)
    last = events_of(response.text)[-1]
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "The engine died"}}


async def test_unknown_fields_are_refused_where_the_server_is_strict() -> None:
    assert (await post(saying("x"), mystery=1)).status_code == 200
    response = await post(saying("x", strict=True), mystery=1)
    assert response.status_code == 400 and "mystery" in response.json()["error"]["message"]
    assert (await post(saying("x", strict=True), cache_control={"type": "ephemeral"})).status_code == 200


async def test_a_schema_becomes_the_form_of_the_answer() -> None:
    server = saying("{}")
    grammars = with_grammars(server)
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert (await post(server, output_config={"format": form})).status_code == 200
    ((structure, param),) = grammars.asked
    assert (structure.kind, structure.value, param) == ("json_schema", '{"type": "object"}', "output_config.format")
    assert server.generator.requests[0].params.structure is not None
    response = await post(saying("{}"), output_config={"format": form})
    assert response.status_code == 400
    assert "output_config.format: tiny has no structured output" in response.json()["error"]["message"]


async def test_a_silent_stream_sends_pings() -> None:
    server = scripted(None, keep_alive_s=0.01)
    client = RawClient(server.app, json.dumps({**ASKED, "stream": True}).encode(), path="/v1/messages")
    async with asyncio.timeout(30):
        while sum(message.get("body", b"").startswith(b"event: ping\n") for message in client.sent) < 3:
            await asyncio.sleep(0.001)
    client.gone.set()
    await client.task
    assert server.generator.live == 0


async def test_arguments_nested_too_deeply_are_an_empty_object() -> None:
    deep = '{"a": ' + "[" * 2000 + "]" * 2000 + "}"
    server = saying(f'<tool_call>\n{{"name": "add", "arguments": {deep}}}\n</tool_call>', size=100, max_model_len=9000)
    (block,) = (await post(server, tools=TOOLS)).json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", {})
