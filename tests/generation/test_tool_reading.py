"""Tools of a request: what is read, and the sentence for what cannot be."""

from __future__ import annotations

import re

import pytest

from raylm.errors import RequestRejected
from raylm.generation.tool_reading import read_tool_use
from raylm.generation.tools import NO_TOOLS, Tool, ToolChoice

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **fields}}


def refused(**body: object) -> tuple[str | None, str]:
    with pytest.raises(RequestRejected) as found:
        read_tool_use(body)
    return found.value.param, str(found.value)


def test_tools_are_read_as_they_are() -> None:
    use = read_tool_use({"tools": [tool(description="d", parameters=SCHEMA, strict=True), tool("b.c-d_1")]})
    assert use.tools == (Tool("weather", "d", SCHEMA, True), Tool("b.c-d_1"))
    assert use.choice == ToolChoice("auto") and use.callable_names == ("weather", "b.c-d_1") and not use.legacy


@pytest.mark.parametrize("body", [{}, {"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tool_choice": "none"}])
def test_a_request_may_have_none(body: dict[str, object]) -> None:
    assert read_tool_use(body) == NO_TOOLS


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("none", ToolChoice("none"), ("a", "b")),
        ("required", ToolChoice("required"), ("a", "b")),
        ({"type": "function", "function": {"name": "b"}}, ToolChoice("named", "b"), ("b",)),
        ({"type": "function", "name": "b"}, ToolChoice("named", "b"), ("b",)),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("b")]}},
            ToolChoice("required"),
            ("b",),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]},
            ToolChoice("auto"),
            ("a",),
        ),
    ],
)
def test_a_choice_in_every_form(choice: object, expected: ToolChoice, names: tuple[str, ...]) -> None:
    use = read_tool_use({"tools": [tool("a"), tool("b")], "tool_choice": choice})
    assert (use.choice, use.callable_names) == (expected, names)
    assert [one.name for one in use.callable_tools] == list(names)


def test_tools_that_are_not_to_be_called_are_not_shown() -> None:
    assert read_tool_use({"tools": [tool()], "tool_choice": "none"}).shown_tools == ()
    assert read_tool_use({"tools": [tool()]}).shown_tools == (Tool("weather"),)


def test_calls_one_at_a_time() -> None:
    assert not read_tool_use({"tools": [tool()], "parallel_tool_calls": False}).choice.parallel
    assert read_tool_use({"tools": [tool()], "parallel_tool_calls": True}).choice.parallel


def test_the_older_form() -> None:
    functions = [{"name": "a", "parameters": SCHEMA}, {"name": "b"}]
    use = read_tool_use({"functions": functions})
    assert use.legacy and use.choice == ToolChoice("auto", parallel=False) and use.callable_names == ("a", "b")
    use = read_tool_use({"functions": functions, "function_call": {"name": "b"}})
    assert use.choice == ToolChoice("named", "b", parallel=False) and use.callable_names == ("b",)
    assert read_tool_use({"functions": functions, "function_call": "none"}).choice.kind == "none"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": ["x"]}, "tools[0]", 'got "x"'),
        ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools", "has 129 entries, at most 128"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 'must be function.*got "web_search"'),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"tools": [tool(), tool("a b")]}, "tools[1].function.name", "1 to 64 letters"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [tool("a"), tool("b"), tool("a")]}, "tools[2].function.name", r"tools\[0\].function.name too"),
        ({"tools": [tool(description=3)]}, "tools[0].function.description", "must be a string"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "must be a JSON schema"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters.type", "must be object"),
        ({"tools": [tool(parameters={"required": "a"})]}, "tools[0].function.parameters.required", "list of names"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "true or false"),
        ({"tools": [tool(other=1)]}, "tools[0].function.other", "not supported"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "auto, none, required"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
            r"\('weather'\), got \"x\"",
        ),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "there are none"),
        ({"tools": [tool()], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "function or allowed_tools"),
        (
            {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice.allowed_tools.tools",
            "at least one",
        ),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"functions": [{"name": "a"}, {"name": "a"}]}, "functions[1].name", r"functions\[0\].name too"),
        ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call.name", "of functions"),
        ({"functions": [{"name": "a"}], "function_call": "required"}, "function_call", "auto, none"),
        ({"tools": [tool()], "function_call": "auto"}, "function_call", "together with tools"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(body: dict[str, object], param: str, words: str) -> None:
    found, message = refused(**body)
    assert found == param and message.startswith(param), message
    assert re.search(words, message), message
