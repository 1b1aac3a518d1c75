"""Anthropic's `tools` and `tool_choice`."""

from __future__ import annotations

from collections.abc import Mapping

from raylm.api.messages.blocks import refuse
from raylm.api.unsupported import Fields, refuse_fields
from raylm.errors import RequestRejected
from raylm.generation.quote import quote
from raylm.generation.tool_reading import MAX_TOOLS, check_names, read_function
from raylm.generation.tools import NO_TOOLS, ChoiceKind, Tool, ToolChoice, ToolUse

_UNSUPPORTED: Fields = {"allowed_callers": ([], ["direct"]), "defer_loading": (False,), "input_examples": ([],)}
_HARMLESS = frozenset({"cache_control", "eager_input_streaming", "type"})
"""Arguments are streamed as they come in any case."""
_KINDS: Mapping[str, ChoiceKind] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def read_tools(tools: object, tool_choice: object) -> ToolUse:
    """None is a field that was left out. Raises RequestRejected, naming the place, such as tools[2].input_schema."""
    if tools is not None and not isinstance(tools, list):
        refuse(f"tools must be a list, got {quote(tools)}", "tools")
    listed = tools or []
    if len(listed) > MAX_TOOLS:
        refuse(f"tools has {len(listed)} entries, at most {MAX_TOOLS} are allowed", "tools")
    found = [_tool(one, f"tools[{index}]") for index, one in enumerate(listed)]
    check_names(found, lambda index: f"tools[{index}].name")
    names = tuple(tool.name for tool in found)
    choice = _choice(tool_choice, names)
    if not found:
        return NO_TOOLS
    return ToolUse(tuple(found), choice, (choice.name,) if choice.kind == "named" else names)


def _tool(value: object, place: str) -> Tool:
    if not isinstance(value, Mapping):
        refuse(f"{place} must be an object with name and input_schema, got {quote(value)}", place)
    kind = value.get("type")
    if kind not in (None, "custom"):
        message = f"{place}.type must be custom (tools of Anthropic's servers and models are not supported)"
        raise RequestRejected(f"{message}, got {quote(kind)}", param=f"{place}.type", code="unsupported_parameter")
    refuse_fields(value, _UNSUPPORTED, f"{place}.")
    function = {name: one for name, one in value.items() if name not in _HARMLESS and name not in _UNSUPPORTED}
    schema = function.pop("input_schema", None)
    if schema is None:
        refuse(f"{place}.input_schema is required", f"{place}.input_schema")
    try:
        return read_function({**function, "parameters": schema}, place)
    except RequestRejected as error:
        ours, theirs = f"{place}.parameters", f"{place}.input_schema"
        param = error.param and error.param.replace(ours, theirs)
        raise RequestRejected(str(error).replace(ours, theirs), param=param, code=error.code) from None


def _choice(value: object, names: tuple[str, ...]) -> ToolChoice:
    field = "tool_choice"
    if value is None:
        return ToolChoice("auto" if names else "none")
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in _KINDS:
        refuse(f"{field} must be an object with type auto, any, tool or none, got {quote(value)}", field)
    alone = value.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        place = f"{field}.disable_parallel_tool_use"
        refuse(f"{place} must be true or false, got {quote(alone)}", place)
    name = value.get("name")
    if kind == "tool" and (not isinstance(name, str) or name not in names):
        known = ", ".join(map(repr, names[:8])) or "there are none"
        refuse(f"{field}.name must be a name of tools ({known}), got {quote(name)}", f"{field}.name")
    if kind == "any" and not names:
        refuse(f"{field}.type is any, but the request has no tools", f"{field}.type")
    return ToolChoice(_KINDS[kind], str(name) if kind == "tool" else "", parallel=not alone)
