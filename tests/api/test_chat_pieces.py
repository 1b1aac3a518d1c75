"""Tool calls and reasoning of chats, as answers and streams of events say them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from raylm.text.chat import ChatTemplate
from tests.api.thinking_models import with_grammars
from tests.support.openai_fakes import Server, said, sse

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TEXT = f"<think>I add.</think>\n\nLet me add.\n{CALL}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
HI = [{"role": "user", "content": "1 + 2?"}]
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools or '' }}"
    "{# <think></think> <tool_call> <|im_start|> #}",
    {},
)


def server_of(text: str) -> Server:
    return Server(*said(text), template=TEMPLATE, max_model_len=2000)


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://raylm/v1", api_key="none", http_client=server.http, max_retries=0)


async def test_an_answer_has_reasoning_text_and_calls() -> None:
    body = (await server_of(TEXT).chat(messages=HI, tools=TOOLS)).json()
    choice = body["choices"][0]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "I add."
    assert message["content"].strip() == "Let me add."
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_reasoning_is_counted_in_a_delta_that_holds_all() -> None:
    """So it comes where the reader was behind: the engine's deltas of a sequence are merged then."""
    server = Server(*said(TEXT, size=len(TEXT)), template=TEMPLATE, max_model_len=2000)
    usage = (await server.chat(messages=HI, tools=TOOLS)).json()["usage"]
    # A token is a byte here.
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("I add.")


async def test_a_stream_has_the_same() -> None:
    async with client_of(server_of(TEXT)) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, stream=True)  # type: ignore
        parts: dict[str, list[str]] = {"reasoning": [], "content": [], "arguments": [], "name": []}
        reasons = []
        async for chunk in stream:  # type: ignore[attr-defined]
            delta: Any = chunk.choices[0].delta
            parts["content"].append(delta.content or "")
            parts["reasoning"].append(getattr(delta, "reasoning_content", None) or "")
            for call in delta.tool_calls or ():
                parts["arguments"].append(call.function.arguments or "")
                parts["name"].append(call.function.name or "")
            if chunk.choices[0].finish_reason is not None:
                reasons.append(chunk.choices[0].finish_reason)
    joined = {name: "".join(found) for name, found in parts.items()}
    assert joined["reasoning"] == "I add." and joined["content"].strip() == "Let me add." and joined["name"] == "add"
    assert json.loads(joined["arguments"]) == {"a": 1, "b": 2}
    assert reasons == ["tool_calls"]


async def test_functions_are_answered_in_their_older_form() -> None:
    function = TOOLS[0]["function"]
    server = server_of(CALL)
    grammars = with_grammars(server)
    choice = (await server.chat(messages=HI, functions=[function])).json()["choices"][0]
    assert [(structure.kind, param) for structure, param in grammars.asked] == [("tool_calls", "functions")]
    assert json.loads(choice["message"]["function_call"]["arguments"]) == {"a": 1, "b": 2}
    assert "tool_calls" not in choice["message"] and choice["message"]["content"] is None
    assert choice["finish_reason"] == "function_call"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_a_call_is_text(fields: dict[str, Any]) -> None:
    message = (await server_of(CALL).chat(messages=HI, **fields)).json()["choices"][0]["message"]
    assert message["content"] == CALL and "tool_calls" not in message


async def test_arguments_that_are_no_text_are_refused() -> None:
    function = {"name": "add", "arguments": '{"a": "\\ud800"}'}
    calls = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls | default([]) | tojson }}{% endfor %}", {})
    response = await Server(*said("x"), template=template).chat(messages=[*HI, calls])
    assert response.status_code == 400 and "surrogates" in response.json()["error"]["message"]


async def test_reasoning_is_left_in_the_text_or_out_of_the_answer() -> None:
    text = "<think>why</think>yes"
    whole = (await server_of(text).chat(messages=HI, separate_reasoning=False)).json()["choices"][0]["message"]
    assert whole["content"] == text and "reasoning" not in whole
    without = (await server_of(text).chat(messages=HI, include_reasoning=False)).json()["choices"][0]["message"]
    assert without["content"] == "yes" and "reasoning" not in without
    # Pieces of two kinds with one text, in one delta of a stream.
    server = Server(*said("<think>yes</think>yes", size=100), template=TEMPLATE, max_model_len=2000)
    events = sse(await server.chat(messages=HI, include_reasoning=False, stream=True))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "yes"


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_an_event_says_one_thing_of_one_call(size: int) -> None:
    """There are clients that read the first entry of `tool_calls` alone."""
    server = Server(*said(CALL + "\n" + CALL, size=size), template=TEMPLATE, max_model_len=2000)
    response = await server.chat(messages=HI, tools=TOOLS, stream=True)
    entries = [event["choices"][0]["delta"].get("tool_calls", []) for event in sse(response)]
    assert max(len(entry) for entry in entries) == 1
    for number in (0, 1):
        own = [entry[0] for entry in entries if entry and entry[0]["index"] == number]
        assert own[0]["function"]["name"] == "add" and all("id" not in entry for entry in own[1:])
        assert json.loads("".join(entry["function"]["arguments"] for entry in own)) == {"a": 1, "b": 2}
