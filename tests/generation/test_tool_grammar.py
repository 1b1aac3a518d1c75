"""Grammars of tool calls: whatever they allow is read as calls that keep to their tools, in every format."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice

import pytest
from jsonschema import validate

from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected
from raylm.generation.parsing import formats
from raylm.generation.parsing.families import ModelFormat
from raylm.generation.parsing.formats import CALL_FORMATS, CallFormat
from raylm.generation.tool_grammar import tool_structure
from raylm.generation.tools import ChoiceKind, Tool, ToolChoice, ToolUse
from raylm.grammar.fault import Fault
from tests.generation.call_walks import compiled, number_taken, read, takes, walk

WEATHER = Tool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "unit"],
    },
    strict=True,
)
CLOCK = Tool("clock", "", None, strict=True)
GET = Tool("get", "", {"type": "object", "properties": {"ratio": {"type": "number"}}, "required": ["ratio"]})
NESTED = Tool(
    "book",
    "",
    {
        "type": "object",
        "properties": {
            "guests": {"type": "array", "items": {"$ref": "#/$defs/Guest"}, "minItems": 1, "maxItems": 2},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["guests", "note"],
        "$defs": {
            "Guest": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name", "age"],
            }
        },
    },
)
TOOLS = (WEATHER, CLOCK, GET, NESTED)
SCHEMAS = {tool.name: dict(tool.parameters or {"type": "object", "properties": {}}) for tool in TOOLS}
NUM_WALKS = 10
MOST_WALKS = 100


def use(kind: ChoiceKind, *tools: Tool, name: str = "", parallel: bool = True, legacy: bool = False) -> ToolUse:
    names = (name,) if name else tuple(tool.name for tool in tools)
    return ToolUse(tools, ToolChoice(kind, name, parallel), names, legacy)


def form_of(calls: CallFormat, *, thinks: bool = False) -> ModelFormat:
    reasoning = formats.CHANNELS if calls.style == "harmony" else formats.THINK
    return ModelFormat(calls, reasoning if thinks else None)


def structure(asked: ToolUse, form: ModelFormat) -> StructuredOutput:
    found = tool_structure(asked, form)
    assert found is not None and found.kind == "tool_calls"
    return found


def walks(made: StructuredOutput, seed: int = 0) -> list[str]:
    grammar, rng = compiled(made), random.Random(seed)
    tries = (walk(grammar, rng) for _ in range(MOST_WALKS))
    found = list(islice((text for text in tries if text is not None), NUM_WALKS))
    assert len(found) == NUM_WALKS
    return found


every_format = pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda one: one.name)


@every_format
@pytest.mark.parametrize("parallel", [True, False], ids=["several", "one"])
def test_required_calls_are_read_as_calls_of_the_tools(calls: CallFormat, parallel: bool) -> None:
    form = form_of(calls)
    numbers = set()
    for text in walks(structure(use("required", *TOOLS, parallel=parallel), form)):
        said, found = read(form, SCHEMAS, text)
        assert said.strip() == "" and found, text
        numbers.add(len(found))
        for name, arguments in found:
            if calls.arguments != "gemma" or name != "book":
                validate(json.loads(arguments), {**SCHEMAS[name], "additionalProperties": False})
    assert parallel or numbers == {1}


@every_format
def test_a_named_call_is_one_of_that_tool(calls: CallFormat) -> None:
    form = form_of(calls, thinks=True)
    for text in walks(structure(use("named", *TOOLS, name="get"), form)):
        said, found = read(form, SCHEMAS, text)
        assert said.strip() == "" and [name for name, _ in found] == ["get"], text
        validate(json.loads(found[0][1]), SCHEMAS["get"])


ARGUMENTS = {"city": 'Ab <b> "c"', "days": 3, "unit": "celsius"}


def written(calls: CallFormat, name: str, arguments: dict[str, object]) -> str:
    """One call as the format's family writes it."""
    begin = calls.section[0] + calls.call_begin(name)
    end = calls.call_end.removesuffix("<|call|>") + calls.section[1]
    if calls.arguments == "json":
        return begin + json.dumps(arguments) + end
    if calls.arguments == "python":
        return begin + ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items()) + end
    if calls.arguments == "gemma":
        quoted = {
            key: f"<escape>{value}<escape>" if isinstance(value, str) else value for key, value in arguments.items()
        }
        return begin + ",".join(f"{key}:{value}" for key, value in quoted.items()) + end
    tags = calls.tags
    assert tags is not None
    members = [
        f"{tags.key_begin}{key}{tags.key_end}{tags.value_begin}{value}{tags.value_end}"
        for key, value in arguments.items()
    ]
    return begin + tags.between.join(members) + end


@every_format
def test_what_a_family_writes_is_allowed_and_what_is_wrong_is_not(calls: CallFormat) -> None:
    form = form_of(calls)
    grammar = compiled(structure(use("required", *TOOLS), form))
    right = written(calls, "get_weather", ARGUMENTS)
    assert takes(grammar, right), (right, number_taken(grammar, right))
    assert read(form, SCHEMAS, right)[1][0][0] == "get_weather"
    assert json.loads(read(form, SCHEMAS, right)[1][0][1]) == ARGUMENTS
    for name, arguments in (
        ("get_whether", ARGUMENTS),
        ("get_weather", {**ARGUMENTS, "days": 15}),
        ("get_weather", {**ARGUMENTS, "unit": "kelvin"}),
        ("get_weather", {**ARGUMENTS, "other": 1}),
        ("get_weather", {"city": "x"}),
    ):
        assert not takes(grammar, written(calls, name, arguments)), (name, arguments)
    assert not takes(grammar, "hello")
    assert takes(grammar, written(calls, "clock", {}))


@every_format
def test_a_strict_tool_is_kept_to_among_free_text(calls: CallFormat) -> None:
    grammar = compiled(structure(use("auto", WEATHER), form_of(calls)))
    text = "" if calls.bare == "[" or calls.style == "harmony" else "I look it up. "
    assert number_taken(grammar, text + written(calls, "get_weather", ARGUMENTS)) is None
    assert not takes(grammar, text + written(calls, "get_weather", {**ARGUMENTS, "days": 15}))
    assert not takes(grammar, text + written(calls, "get_whether", ARGUMENTS))
    answer = "<|channel|>final<|message|>It is warm." if calls.style == "harmony" else "It is {warm}."
    assert takes(grammar, answer)


@every_format
def test_thinking_may_come_before_calls(calls: CallFormat) -> None:
    form = form_of(calls, thinks=True)
    grammar = compiled(structure(use("required", *TOOLS), form))
    call = written(calls, "clock", {})
    if calls.style == "harmony":
        thought = "<|channel|>analysis<|message|>so { it <is>.<|end|><|start|>assistant"
    else:
        thought = "<think>so { it </thin> is.</think>\n\n"
    assert takes(grammar, thought + call) and takes(grammar, call)
    assert not takes(grammar, thought) and not takes(grammar, thought + "text")
    begun = tool_structure(use("required", *TOOLS), form, end_of_thinking=(5, 6))
    assert begun is not None and begun.begin_after == (5, 6)
    assert not takes(compiled(begun), thought + call) and takes(compiled(begun), call)


@every_format
def test_an_answer_is_calls_or_of_the_structure_that_the_request_wants(calls: CallFormat) -> None:
    answer = StructuredOutput("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    final = "<|channel|>final<|message|>" if calls.style == "harmony" else ""
    for thinks in (False, True):
        made = tool_structure(use("auto", CLOCK), form_of(calls, thinks=thinks), answer=answer)
        assert made is not None
        grammar = compiled(made)
        assert takes(grammar, final + '{"a": 3}') and takes(grammar, written(calls, "clock", {}))
        assert not takes(grammar, final + '{"b": 3}') and not takes(grammar, "hello")
    thought = "<|channel|>analysis<|message|>x<|end|><|start|>assistant" if final else "<think>x</think>\n"
    assert takes(grammar, thought + final + '{"a": 3}')


@every_format
def test_one_call_at_most_among_free_text(calls: CallFormat) -> None:
    grammar = compiled(structure(use("auto", GET, parallel=False), form_of(calls)))
    one = written(calls, "get", {"ratio": 0.5})
    # harmony's calls end with a token that ends the answer.
    assert takes(grammar, one) and (calls.style == "harmony" or not takes(grammar, one + calls.separator + one))
    assert takes(grammar, "<|channel|>final<|message|>No." if calls.style == "harmony" else "No.")


@every_format
def test_only_allowed_tools_are_called_among_free_text(calls: CallFormat) -> None:
    asked = replace(use("auto", GET, replace(CLOCK, strict=False)), callable_names=("get",))
    grammar = compiled(structure(asked, form_of(calls)))
    assert takes(grammar, written(calls, "get", {"ratio": 0.5}))
    assert not takes(grammar, written(calls, "clock", {}))
    assert tool_structure(asked, ModelFormat()) is None, "where no calls are read none can be wrong"


BROKEN = {"type": "object", "properties": {"a": {"type": "string", "contentFoo": 1}}, "required": ["a"]}


@every_format
def test_a_schema_that_cannot_be_kept_to_leaves_the_name_enforced_unless_it_is_strict(calls: CallFormat) -> None:
    form = form_of(calls)
    loose = Tool("loose", "", BROKEN)
    grammar = compiled(structure(use("required", loose), form))
    assert takes(grammar, written(calls, "loose", {"b": "x", "c": 1}))
    assert not takes(grammar, written(calls, "lose", {"b": "x"}))
    with pytest.raises(Fault, match=r"tools\[1\].function.parameters: #/properties/a: .*'contentFoo' is not supported"):
        compiled(structure(use("required", CLOCK, replace(loose, strict=True)), form))
    with pytest.raises(Fault, match=r"functions\[0\].parameters: "):
        compiled(structure(use("named", replace(loose, strict=True), name="loose", legacy=True), form))


def test_what_needs_no_grammar_gets_none() -> None:
    form = ModelFormat(formats.HERMES)
    answer = StructuredOutput("json_object")
    assert tool_structure(use("auto", GET), form) is None
    assert tool_structure(ToolUse(), form) is None
    assert tool_structure(use("none", WEATHER), form, answer=answer) is answer


def test_calls_of_an_unknown_format_are_refused() -> None:
    with pytest.raises(RequestRejected, match="tool_choice: required needs a model whose") as refused:
        tool_structure(use("required", GET), ModelFormat())
    assert refused.value.param == "tool_choice"
    with pytest.raises(RequestRejected, match="tools: strict or") as refused:
        tool_structure(use("auto", WEATHER), ModelFormat())
    assert refused.value.param == "tools"


def test_rules_that_differ_in_special_tokens_alone_are_not_taken_for_equal() -> None:
    """One compiler for both, as in an engine."""
    for style in (formats.MISTRAL_THINK, formats.CHANNELS):
        asked = structure(use("required", CLOCK), ModelFormat(formats.MISTRAL, style))
        thought = f"{style.begin[0]}so{style.end[0]}"
        assert takes(compiled(asked), thought + "[TOOL_CALLS]clock[ARGS]{}")
