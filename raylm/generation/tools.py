"""Tools that a request offers to the model, and which of them the model may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ChoiceKind = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    parameters: the JSON schema of the arguments, an object's; None for a function without arguments.
    strict: every call must keep to `parameters`; a schema that cannot be enforced is then refused.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    strict: bool = False

    def as_function(self) -> dict[str, object]:
        """The tool as chat templates read it: {"type": "function", "function": {...}}."""
        function: dict[str, object] = {"name": self.name, "description": self.description}
        function["parameters"] = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools.

    kind: "auto" (text, calls or both), "none" (text only), "required" (at least one call) or "named" (one call of
        the tool `name`).
    name: the tool of kind "named", else empty.
    parallel: several calls in one answer are allowed.
    """

    kind: ChoiceKind = "auto"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request and the choice among them. Empty tools go with the choice "none" only.

    tools: all that the request has, checked.
    callable_names: the tools that may be called, all of `tools` unless the request allows fewer (`allowed_tools`).
    legacy: asked for with `functions`, so answers have `function_call` instead of `tool_calls`, and at most one call.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice("none")
    callable_names: tuple[str, ...] = ()
    legacy: bool = False

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the chat template shows: none where the model is not to call any."""
        return () if self.choice.kind == "none" else self.tools

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that may be called, in the request's order."""
        return [tool for tool in self.tools if tool.name in self.callable_names]


NO_TOOLS = ToolUse()
