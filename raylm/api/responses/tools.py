"""The tools of a request: functions of the client's own, and those of MCP servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raylm.api.responses.open_items import RemoteTool
from raylm.api.responses.remote import Listing, RemoteServer, RemoteTools
from raylm.errors import RequestRejected
from raylm.generation.quote import quote
from raylm.generation.tool_reading import MAX_TOOLS, check_names, read_function, read_tools
from raylm.generation.tools import Tool, ToolUse


class AskedTools(NamedTuple):
    """`tools` of a request. shown: the same as the response repeats it."""

    functions: list[Tool]
    servers: list[RemoteServer]
    shown: list[object]


class UsableTools(NamedTuple):
    """What the model may call. remote: the tools of MCP servers among them, by the names that the model calls."""

    use: ToolUse
    remote: Mapping[str, RemoteTool]


def read_asked_tools(tools: Sequence[object] | None, remote: RemoteTools) -> AskedTools:
    """Raises RequestRejected."""
    given = list(tools or [])
    if len(given) > MAX_TOOLS:
        raise RequestRejected(f"tools has {len(given)} entries, at most {MAX_TOOLS} are allowed", param="tools")
    asked = AskedTools([], [], [])
    places: list[str] = []
    for index, one in enumerate(given):
        place = f"tools[{index}]"
        if not isinstance(one, Mapping):
            raise RequestRejected(f"{place} must be an object with a type, got {quote(one)}", param=place)
        kind = one.get("type")
        if kind == "mcp":
            server = remote.read(one, place)
            if any(server.label == other.label for other in asked.servers):
                raise RequestRejected(f"{place}.server_label {server.label!r} is given twice", param=place)
            asked.servers.append(server)
            asked.shown.append(server.shown)
        elif kind == "function":
            tool = read_function({name: value for name, value in one.items() if name != "type"}, place)
            asked.functions.append(tool)
            places.append(place)
            asked.shown.append(_shown(tool))
        else:
            raise RequestRejected(
                f"{place}.type {quote(kind)} is not supported; this server has function and mcp",
                param=f"{place}.type",
                code="unsupported_tool",
            )
    check_names(asked.functions, lambda index: f"{places[index]}.name")
    return asked


def usable(asked: AskedTools, listings: Sequence[Listing], choice: object, parallel: bool | None) -> UsableTools:
    """The tools of a request with those that its servers have listed. A name that is taken gets its server's label in
    front. Raises RequestRejected."""
    tools = list(asked.functions)
    taken = {tool.name for tool in tools}
    remote: dict[str, RemoteTool] = {}
    for listing in listings:
        for tool in listing.tools:
            name = tool.name if tool.name not in taken else f"{listing.server.label}.{tool.name}"
            taken.add(name)
            tools.append(replace(tool, name=name))
            remote[name] = RemoteTool(listing.server.label, tool.name, listing.server.needs_approval(tool.name))
    use = read_tools([tool.as_function() for tool in tools], choice, parallel)
    return UsableTools(replace(use, tools=tuple(tools)) if use.tools else use, remote)


def _shown(tool: Tool) -> dict[str, object]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
