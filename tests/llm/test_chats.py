"""Chats with tools on a real model: what the request demands of its calls holds, however small the model is."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from jsonschema import validate

from raylm import LLM, SamplingParams, StructuredOutput
from raylm.config.base import parse
from raylm.config.engine import EngineConfig
from raylm.errors import RequestRejected

pytestmark = pytest.mark.usefixtures("demo")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
}
CLOCK = {"type": "object", "properties": {"zone": {"type": "string", "enum": ["CET", "UTC"]}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": CLOCK}},
]
SCHEMAS = {"get_weather": WEATHER, "clock": CLOCK}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=100)
HOT = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=100)


@pytest.fixture(scope="module")
def llm(demo: object) -> Iterator[LLM]:
    settings = {
        "model": {"path": "smollm2-135m", "max_model_len": 1024},
        "cache": {"num_blocks": 300, "block_size": 16},
        "runtime": {"device": "cpu", "num_threads": 1},
    }
    made = LLM(parse(EngineConfig, settings, source="test"), progress=False)
    yield made
    made.close()


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
def test_required_gives_calls_that_keep_to_their_tools(llm: LLM, params: SamplingParams) -> None:
    (found,) = llm.chat(ASKED, params, tools=TOOLS, tool_choice="required", progress=False)
    for output in found.outputs:
        # A model so small may call on until its tokens are spent, in the midst of a call.
        is_cut = output.finish_reason == "length"
        calls = output.tool_calls[:-1] if is_cut else output.tool_calls
        assert calls and (is_cut or (output.finish_reason == "tool_calls" and not output.text.strip()))
        for call in calls:
            validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_named_gives_one_call_of_that_tool(llm: LLM) -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    (found,) = llm.chat(ASKED, HOT, tools=TOOLS, tool_choice=choice, progress=False)
    for output in found.outputs:
        (call,) = output.tool_calls
        assert call.name == "clock" and json.loads(call.arguments)["zone"] in ("CET", "UTC")


def test_a_structure_and_tools_give_either(llm: LLM) -> None:
    form = StructuredOutput(
        "json_schema", '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    )
    params = SamplingParams(temperature=1.5, seed=4, n=4, max_tokens=200, structure=form)
    (found,) = llm.chat(ASKED, params, tools=TOOLS, progress=False)
    for output in found.outputs:
        if output.finish_reason == "tool_calls":
            assert output.tool_calls
        elif output.finish_reason == "stop":
            assert json.loads(output.text)["a"] in (1, 2)


def test_a_strict_tool_whose_schema_cannot_be_kept_to_is_refused(llm: LLM) -> None:
    broken = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "x", "parameters": broken, "strict": True}}
    with pytest.raises(RequestRejected, match=r"tools\[0\].function.parameters: #/properties/a: the keyword 'not'"):
        llm.chat(ASKED, GREEDY, tools=[tool], tool_choice="required", progress=False)
