"""The fields of a request that offer tools, as OpenAI's clients send them: tools, tool_choice, parallel_tool_calls, and
their older forms functions and function_call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from raylm.errors import RequestRejected
from raylm.generation.quote import quote
from raylm.generation.tools import NO_TOOLS, Tool, ToolChoice, ToolUse

MAX_TOOLS = 128
"""OpenAI's limit."""
MAX_DESCRIPTION_CHARS = 65_536
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_TOOL_KEYS = frozenset({"type", "function"})
_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
_ALLOWED_MODES = ("auto", "required")
_HARMLESS_KEYS = frozenset({"cache_control"})
"""Anthropic's mark for its prompt cache, which some clients leave in; prefixes are cached here without it."""
_SHOWN_NAMES = 8


def read_tools(tools: object, tool_choice: object, parallel_tool_calls: object) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` ask for; None is a field that was left out.

    Raises RequestRejected, naming the place, such as tools[2].function.name.
    """
    found = _tools(tools, "tools")
    choice, names = _choice(tool_choice, found)
    parallel = _flag(parallel_tool_calls, "parallel_tool_calls", default=True)
    if not found:
        return NO_TOOLS
    return ToolUse(found, ToolChoice(choice.kind, choice.name, parallel), names)


def read_functions(functions: object, function_call: object) -> ToolUse:
    """What OpenAI's older `functions` and `function_call` ask for; None is a field that was left out.

    Raises RequestRejected, naming the place, such as functions[2].name.
    """
    found = _functions(functions)
    choice = _function_call(function_call, found)
    if not found:
        return NO_TOOLS
    names = (choice.name,) if choice.kind == "named" else tuple(tool.name for tool in found)
    return ToolUse(found, choice, names, legacy=True)


def read_tool_use(data: Mapping[str, object]) -> ToolUse:
    """What a request's body asks for in either form; both together are refused. Raises RequestRejected."""
    new = any(data.get(field) is not None for field in ("tools", "tool_choice"))
    old = next((field for field in ("functions", "function_call") if data.get(field) is not None), None)
    if old is None:
        return read_tools(data.get("tools"), data.get("tool_choice"), data.get("parallel_tool_calls"))
    if new:
        _refuse(f"{old} is not possible together with tools or tool_choice, which replace it", old)
    _flag(data.get("parallel_tool_calls"), "parallel_tool_calls", default=True)
    return read_functions(data.get("functions"), data.get("function_call"))


def read_function(value: Mapping[str, object], place: str) -> Tool:
    """One function: {"name", "description", "parameters", "strict"}. Raises RequestRejected, naming `place`."""
    _check_keys(value, _FUNCTION_KEYS, place)
    name = _name(value.get("name"), f"{place}.name")
    description = value.get("description")
    if description is not None and not isinstance(description, str):
        _refuse(f"{place}.description must be a string, got {quote(description)}", f"{place}.description")
    if description is not None and len(description) > MAX_DESCRIPTION_CHARS:
        _refuse(
            f"{place}.description has {len(description)} characters, at most {MAX_DESCRIPTION_CHARS} are allowed",
            f"{place}.description",
        )
    parameters = _parameters(value.get("parameters"), f"{place}.parameters")
    strict = _flag(value.get("strict"), f"{place}.strict", default=False)
    return Tool(name, description or "", parameters, strict)


def _tools(value: object, field: str) -> tuple[Tool, ...]:
    found = []
    for index, one in enumerate(_list(value, field)):
        place = f"{field}[{index}]"
        if not isinstance(one, Mapping):
            _refuse(f"{place} must be an object with type and function, got {quote(one)}", place)
        kind = one.get("type")
        if kind != "function":
            _refuse(f"{place}.type must be function, the only type of tool here, got {quote(kind)}", f"{place}.type")
        _check_keys(one, _TOOL_KEYS, place)
        function = one.get("function")
        if not isinstance(function, Mapping):
            _refuse(f"{place}.function must be an object, got {quote(function)}", f"{place}.function")
        found.append(read_function(function, f"{place}.function"))
    check_names(found, lambda index: f"{field}[{index}].function.name")
    return tuple(found)


def _functions(value: object) -> tuple[Tool, ...]:
    found = []
    for index, one in enumerate(_list(value, "functions")):
        if not isinstance(one, Mapping):
            _refuse(f"functions[{index}] must be an object with a name, got {quote(one)}", f"functions[{index}]")
        found.append(read_function(one, f"functions[{index}]"))
    check_names(found, lambda index: f"functions[{index}].name")
    return tuple(found)


def check_names(tools: list[Tool], place_of: Callable[[int], str]) -> None:
    """Raises RequestRejected where two tools have one name; `place_of(i)` is the place of the i-th tool's name."""
    first: dict[str, int] = {}
    for index, tool in enumerate(tools):
        if tool.name in first:
            place = place_of(index)
            _refuse(f"{place} is {tool.name!r}, the name of {place_of(first[tool.name])} too", place)
        first[tool.name] = index


def _list(value: object, field: str) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        _refuse(f"{field} must be a list, got {quote(value)}", field)
    if len(value) > MAX_TOOLS:
        _refuse(f"{field} has {len(value)} entries, at most {MAX_TOOLS} are allowed", field)
    return list(value)


def _name(value: object, place: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        _refuse(f"{place} must be 1 to 64 letters, digits, '_', '.' and '-', got {quote(value)}", place)
    return value


def _parameters(value: object, place: str) -> dict[str, object] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        _refuse(f"{place} must be a JSON schema, an object, got {quote(value)}", place)
    kind = value.get("type", "object")
    if kind != "object":
        _refuse(f"{place}.type must be object, as arguments are one, got {quote(kind)}", f"{place}.type")
    for key, expected, what in (("properties", Mapping, "an object"), ("required", list | tuple, "a list of names")):
        if key in value and not isinstance(value[key], expected):
            _refuse(f"{place}.{key} must be {what}, got {quote(value[key])}", f"{place}.{key}")
    return dict(value)


def _choice(value: object, tools: tuple[Tool, ...]) -> tuple[ToolChoice, tuple[str, ...]]:
    """The choice, and the names of the tools that it leaves."""
    field = "tool_choice"
    every = tuple(tool.name for tool in tools)
    if isinstance(value, Mapping):
        if value.get("type") == "allowed_tools":
            return _allowed_tools(value, every)
        if value.get("type") == "function":
            name = _chosen_name(value, field, every)
            return ToolChoice("named", name), (name,)
        _refuse(f"{field}.type must be function or allowed_tools, got {quote(value.get('type'))}", f"{field}.type")
    if value is None:
        value = "auto" if tools else "none"
    if value == "auto" or value == "none":
        return ToolChoice(value), every
    if value == "required":
        if not tools:
            _refuse(f"{field} is required, but the request has no tools", field)
        return ToolChoice("required"), every
    _refuse(f"{field} must be auto, none, required or an object that names a tool, got {quote(value)}", field)


def _allowed_tools(value: Mapping[str, object], every: tuple[str, ...]) -> tuple[ToolChoice, tuple[str, ...]]:
    """Chat: {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}; Responses has mode and tools beside type."""
    place = "tool_choice.allowed_tools" if "allowed_tools" in value else "tool_choice"
    inner = value.get("allowed_tools", value)
    if not isinstance(inner, Mapping):
        _refuse(f"{place} must be an object with mode and tools, got {quote(inner)}", place)
    mode = inner.get("mode", "auto")
    if mode not in _ALLOWED_MODES:
        _refuse(f"{place}.mode must be auto or required, got {quote(mode)}", f"{place}.mode")
    listed = _list(inner.get("tools"), f"{place}.tools")
    if not listed:
        _refuse(f"{place}.tools must name at least one tool", f"{place}.tools")
    names = set()
    for index, one in enumerate(listed):
        where = f"{place}.tools[{index}]"
        if not isinstance(one, Mapping) or one.get("type") != "function":
            _refuse(f"{where} must be an object of type function, got {quote(one)}", where)
        names.add(_chosen_name(one, where, every))
    return ToolChoice("required" if mode == "required" else "auto"), tuple(name for name in every if name in names)


def _chosen_name(value: Mapping[str, object], place: str, every: tuple[str, ...]) -> str:
    """Chat: {"type", "function": {"name"}}; Responses: {"type", "name"}."""
    inner = value.get("function", value)
    where = f"{place}.function.name" if "function" in value else f"{place}.name"
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return _known_name(name, where, every, "tools")


def _function_call(value: object, functions: tuple[Tool, ...]) -> ToolChoice:
    field = "function_call"
    if isinstance(value, Mapping):
        every = tuple(tool.name for tool in functions)
        name = _known_name(value.get("name"), f"{field}.name", every, "functions")
        return ToolChoice("named", name, parallel=False)
    if value is None:
        value = "auto" if functions else "none"
    if value != "auto" and value != "none":
        _refuse(f"{field} must be auto, none or an object that names a function, got {quote(value)}", field)
    return ToolChoice(value, parallel=False)


def _known_name(name: object, place: str, every: tuple[str, ...], field: str) -> str:
    if not isinstance(name, str) or name not in every:
        known = ", ".join(map(repr, every[:_SHOWN_NAMES])) + (", ..." if len(every) > _SHOWN_NAMES else "")
        _refuse(f"{place} must be a name of {field} ({known or 'there are none'}), got {quote(name)}", place)
    return name


def _flag(value: object, place: str, *, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        _refuse(f"{place} must be true or false, got {quote(value)}", place)
    return value


def _check_keys(value: Mapping[str, object], allowed: frozenset[str], place: str) -> None:
    """Raises RequestRejected for a key that is not allowed; null says nothing."""
    for key, one in value.items():
        if key not in allowed and key not in _HARMLESS_KEYS and one is not None:
            name = f"{place}.{key:.64}"
            raise RequestRejected(
                f"{name} is not supported, got {quote(one)}", param=name, code="unsupported_parameter"
            )


def _refuse(message: str, param: str) -> NoReturn:
    raise RequestRejected(message, param=param)
