"""Anthropic's requests: conversations, tools, thinking, fields."""

from __future__ import annotations

from typing import Any

import pytest

from raylm.api.messages.conversation import read_conversation
from raylm.api.messages.reading import Thinking, read_output_config, read_thinking
from raylm.api.messages.request import KNOWN, MessagesRequest, refuse_unsupported
from raylm.api.messages.tools import read_tools
from raylm.api.parser import validated
from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected
from raylm.generation.tools import NO_TOOLS, Tool, ToolChoice

CACHED = {"cache_control": {"type": "ephemeral"}}
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, **CACHED}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def use(own_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": own_id, "name": "weather", "input": {"city": "Bern"}, **fields}


def result(own_id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": own_id, **fields}


def called(own_id: str = "toolu_1") -> dict[str, Any]:
    return {"id": own_id, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}


def part(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_strings_and_blocks_are_the_same() -> None:
    as_strings = read_conversation("Be kind.", [{"role": "user", "content": "hi"}])
    as_blocks = read_conversation([text("Be kind.")], [user(text("hi"))])
    assert as_strings == as_blocks
    assert as_strings.messages == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert not as_strings.is_open


def test_several_texts_are_parts() -> None:
    found = read_conversation([text("a"), text("b")], [user(text("c"), text("d"))])
    assert found.messages == [
        {"role": "system", "content": [part("a"), part("b")]},
        {"role": "user", "content": [part("c"), part("d")]},
    ]


def test_turns_of_one_role_are_one() -> None:
    found = read_conversation(
        None,
        [user(text("a")), {"role": "user", "content": "b"}, assistant(text("c")), assistant(use()), user(result())],
    )
    assert found.messages == [
        {"role": "user", "content": [part("a"), part("b")]},
        {"role": "assistant", "content": "c", "tool_calls": [called()]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": ""},
    ]


def test_calls_and_results() -> None:
    thinking = {"type": "thinking", "thinking": "Which city?", "signature": "msg_1"}
    redacted = {"type": "redacted_thinking", "data": "AAAA"}
    found = read_conversation(
        None,
        [
            user(text("Weather?")),
            assistant(thinking, redacted, text("I look."), use("toolu_1"), use("toolu_2")),
            user(
                result("toolu_1", content="sunny"),
                result("toolu_2", content=[text("no"), text("city")], is_error=True),
                text("And now?"),
            ),
        ],
    )
    assert found.messages[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Which city?",
            "tool_calls": [called("toolu_1"), called("toolu_2")],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "weather", "content": "Error: no\ncity"},
        {"role": "user", "content": "And now?"},
    ]


def test_a_system_message_may_stand_between_others() -> None:
    found = read_conversation(None, [user(text("a")), {"role": "system", "content": "Be brief."}, user(text("b"))])
    assert [message["role"] for message in found.messages] == ["user", "system", "user"]


def test_an_answer_goes_on_from_the_last_message() -> None:
    found = read_conversation(None, [user(text("Sun?")), assistant(text("It is ("))])
    assert found.is_open
    assert found.messages[-1] == {"role": "assistant", "content": "It is ("}


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        (["hi"], "messages[0]", "must be an object"),
        ([{"role": "tool", "content": "x"}], "messages[0].role", 'user, assistant or system, got "tool"'),
        ([{"role": "user"}], "messages[0].content", "must be a string or a list of blocks, got null"),
        ([user("hi")], "messages[0].content[0]", "must be an object with a type"),
        (
            [user({"type": "image", "source": {}})],
            "messages[0].content[0].type",
            'images, are not supported), got "image"',
        ),
        ([user({"type": "document", "source": {}})], "messages[0].content[0].type", 'got "document"'),
        ([user(part("a"), {"type": "text"})], "messages[0].content[1].text", "must be a string, got null"),
        ([user(use())], "messages[0].content[0].type", "text or tool_result"),
        ([user(result("")), user()], "messages[0].content[0].tool_use_id", "that is not empty"),
        ([user(result(is_error=1))], "messages[0].content[0].is_error", "must be true or false, got 1"),
        (
            [user(result(content=[{"type": "image"}]))],
            "messages[0].content[0].content[0].type",
            'must be text (others, such as images, are not supported), got "image"',
        ),
        ([assistant(use(input="{}"))], "messages[0].content[0].input", "must be an object"),
        ([assistant(use(name=""))], "messages[0].content[0].name", "must be a string that is not empty"),
        ([user(text("a")), assistant(use())], "messages", "messages[1] calls tools"),
    ],
)
def test_conversations_that_are_none(messages: list[Any], param: str, says: str) -> None:
    with pytest.raises(RequestRejected) as raised:
        read_conversation(None, messages)
    assert raised.value.param == param
    assert str(raised.value).startswith(param)
    assert says in str(raised.value)


def test_tools() -> None:
    own = {**WEATHER, **CACHED, "type": "custom", "strict": True, "eager_input_streaming": True, "defer_loading": False}
    found = read_tools([own, {"name": "now", "input_schema": {"type": "object"}}], None)
    assert found.tools == (
        Tool("weather", "of a city", WEATHER["input_schema"], strict=True),
        Tool("now", "", {"type": "object"}),
    )
    assert found.choice == ToolChoice("auto")
    assert found.callable_names == ("weather", "now")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto", parallel=False)),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", parallel=False)),
        ({"type": "tool", "name": "weather"}, ToolChoice("named", "weather")),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice) -> None:
    assert read_tools([WEATHER], choice).choice == expected


def test_no_tools() -> None:
    assert read_tools(None, None) == read_tools([], {"type": "auto"}) == NO_TOOLS


@pytest.mark.parametrize(
    ("tools", "choice", "param", "says"),
    [
        ({}, None, "tools", "must be a list"),
        (["x"], None, "tools[0]", "must be an object"),
        ([{"type": "web_search_20250305", "name": "web_search"}], None, "tools[0].type", "are not supported"),
        ([{"name": "x"}], None, "tools[0].input_schema", "is required"),
        ([{"name": "x", "input_schema": []}], None, "tools[0].input_schema", "must be a JSON schema"),
        ([{"name": "x y", "input_schema": {}}], None, "tools[0].name", "must be 1 to 64"),
        ([{**WEATHER, "defer_loading": True}], None, "tools[0].defer_loading", "is not supported"),
        ([{**WEATHER, "mystery": 1}], None, "tools[0].mystery", "is not supported"),
        ([WEATHER, WEATHER], None, "tools[1].name", "the name of tools[0].name too"),
        ([WEATHER], "auto", "tool_choice", "must be an object"),
        ([WEATHER], {"type": "tool", "name": "x"}, "tool_choice.name", "'weather'"),
        (
            [WEATHER],
            {"type": "any", "disable_parallel_tool_use": 1},
            "tool_choice.disable_parallel_tool_use",
            "true or",
        ),
        ([], {"type": "any"}, "tool_choice.type", "has no tools"),
    ],
)
def test_tools_that_are_none(tools: Any, choice: Any, param: str, says: str) -> None:
    with pytest.raises(RequestRejected) as raised:
        read_tools(tools, choice)
    assert raised.value.param == param
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Thinking(False)),
        ({"type": "disabled"}, Thinking(False)),
        ({"type": "adaptive"}, Thinking(True)),
        ({"type": "adaptive", "display": "omitted"}, Thinking(True, None, is_shown=False)),
        ({"type": "enabled", "budget_tokens": 9, "display": "summarized"}, Thinking(True, 9)),
    ],
)
def test_thinking(value: Any, expected: Thinking) -> None:
    assert read_thinking(value, max_tokens=10) == expected


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("on", "thinking"),
        ({"type": "between_tools"}, "thinking"),
        ({"type": "enabled"}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": True}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 10}, "thinking.budget_tokens"),
        ({"type": "adaptive", "display": "loud"}, "thinking.display"),
    ],
)
def test_thinking_that_is_none(value: Any, param: str) -> None:
    with pytest.raises(RequestRejected) as raised:
        read_thinking(value, max_tokens=10)
    assert raised.value.param == param


def test_output_config() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    found = read_output_config({"effort": "max", "format": form}, None)
    assert found == ("high", StructuredOutput("json_schema", '{"type": "object"}'), "output_config.format")
    assert read_output_config(None, form).field == "output_format"
    for wrong, param in (
        ("x", "output_config"),
        ({"effort": "huge"}, "output_config.effort"),
        ({"format": {"type": "text"}}, "output_config.format"),
        ({"format": {"type": "json_schema"}}, "output_config.format.schema"),
        ({"task_budget": {"total": 1}}, "output_config.task_budget"),
    ):
        with pytest.raises(RequestRejected) as raised:
            read_output_config(wrong, None)
        assert raised.value.param == param


def test_fields_that_claude_code_sends_are_taken() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    body: dict[str, object] = {
        "model": "tiny",
        "messages": [user(text("hi"))],
        "max_tokens": 100,
        "context_management": {"edits": edits},
        "service_tier": "auto",
        "metadata": {"user_id": "x"},
        "speed": "standard",
    }
    assert body.keys() <= KNOWN
    refuse_unsupported(body)
    assert validated(MessagesRequest, body).max_tokens == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mcp_servers", [{"url": "http://x"}]),
        ("container", "c"),
        ("speed", "fast"),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ],
)
def test_fields_that_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestRejected, match=f"^{field}.*not supported") as raised:
        refuse_unsupported({field: value})
    assert raised.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": None}, "max_tokens must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1, got 0"),
        ({"temperature": 1.5}, "temperature must be less than or equal to 1, got 1.5"),
        ({"messages": []}, "messages "),
        ({"metadata": {"user_id": "x" * 300}}, "metadata.user_id "),
    ],
)
def test_values_out_of_range(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestRejected) as raised:
        validated(MessagesRequest, {"messages": ["x"], "max_tokens": 1, **fields})
    assert str(raised.value).startswith(says)


def test_max_tokens_is_required() -> None:
    with pytest.raises(RequestRejected, match="^max_tokens is required$"):
        validated(MessagesRequest, {"messages": ["x"]})
