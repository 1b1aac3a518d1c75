"""The tools of a request: functions of the client's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raylm.errors import RequestRejected
from raylm.generation.quote import quote
from raylm.generation.tool_reading import MAX_TOOLS, check_names, read_function, read_tools
from raylm.generation.tools import Tool, ToolUse


class AskedTools(NamedTuple):
    """What a request may call. shown: `tools` as the response repeats it."""

    use: ToolUse
    shown: list[object]


def read_asked_tools(tools: Sequence[object] | None, choice: object, parallel: bool | None) -> AskedTools:
    """What `tools`, `tool_choice` and `parallel_tool_calls` ask for. Raises RequestRejected."""
    given = list(tools or [])
    if len(given) > MAX_TOOLS:
        raise RequestRejected(f"tools has {len(given)} entries, at most {MAX_TOOLS} are allowed", param="tools")
    found = [_function(one, f"tools[{index}]") for index, one in enumerate(given)]
    check_names(found, lambda index: f"tools[{index}].name")
    use = read_tools([tool.as_function() for tool in found], choice, parallel)
    shown: list[object] = [_shown(tool) for tool in found]
    return AskedTools(replace(use, tools=tuple(found)) if use.tools else use, shown)


def _function(value: object, place: str) -> Tool:
    if not isinstance(value, Mapping):
        raise RequestRejected(f"{place} must be an object with a type, got {quote(value)}", param=place)
    kind = value.get("type")
    if kind != "function":
        raise RequestRejected(
            f"{place}.type {quote(kind)} is not supported; this server has function",
            param=f"{place}.type",
            code="unsupported_tool",
        )
    return read_function({name: one for name, one in value.items() if name != "type"}, place)


def _shown(tool: Tool) -> dict[str, object]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
