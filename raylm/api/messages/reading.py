"""Anthropic's `thinking` and `output_config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from raylm.api.messages.blocks import refuse
from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected
from raylm.generation.quote import quote

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""What chat templates know of them."""
_DISPLAYS = ("summarized", "omitted")


class Thinking(NamedTuple):
    """is_on: the model thinks before it answers. budget: tokens that it may think for at most; None: no limit.

    is_shown: the answer's blocks of thinking have its text.
    """

    is_on: bool = False
    budget: int | None = None
    is_shown: bool = True

    def variables(self) -> dict[str, object]:
        """The variables by which chat templates switch thinking on and off."""
        return {"enable_thinking": self.is_on, "thinking": self.is_on}


def read_thinking(value: object, max_tokens: int | None) -> Thinking:
    """`thinking` of a request; without it the model is not to think. `max_tokens` is the request's, None where it has
    none. Raises RequestRejected."""
    if value is None:
        return Thinking()
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("enabled", "disabled", "adaptive"):
        refuse(f"thinking must be an object with type enabled, adaptive or disabled, got {quote(value)}", "thinking")
    display = value.get("display")
    if display is not None and display not in _DISPLAYS:
        refuse(f"thinking.display must be summarized or omitted, got {quote(display)}", "thinking.display")
    if kind != "enabled":
        return Thinking(kind == "adaptive", None, display != "omitted")
    field, budget = "thinking.budget_tokens", value.get("budget_tokens")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        refuse(f"{field} must be an integer of at least 1, got {quote(budget)}", field)
    if max_tokens is not None and budget >= max_tokens:
        refuse(f"{field} must be less than max_tokens ({max_tokens}), got {budget}", field)
    return Thinking(True, budget, display != "omitted")


class OutputConfig(NamedTuple):
    """effort: of thinking, as chat templates know it. structure: the form of the answer's text, from `field`."""

    effort: str | None = None
    structure: StructuredOutput | None = None
    field: str = ""


def read_output_config(value: object, output_format: object) -> OutputConfig:
    """`output_config`, and `output_format`, an older name of its format. Raises RequestRejected."""
    if value is not None and not isinstance(value, Mapping):
        refuse(f"output_config must be an object with effort and format, got {quote(value)}", "output_config")
    given = {} if value is None else value
    for name in given:
        if name not in ("effort", "format") and given[name] is not None:
            place = f"output_config.{name:.64}"
            raise RequestRejected(f"{place} is not supported", param=place, code="unsupported_parameter")
    effort = given.get("effort")
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        message = f"output_config.effort must be low, medium, high, xhigh or max, got {quote(effort)}"
        refuse(message, "output_config.effort")
    field, form = "output_config.format", given.get("format")
    if form is None:
        field, form = "output_format", output_format
    structure = None if form is None else _structure(form, field)
    return OutputConfig(None if effort is None else _EFFORTS[effort], structure, field)


def _structure(value: object, field: str) -> StructuredOutput:
    if not isinstance(value, Mapping) or value.get("type") != "json_schema":
        refuse(f"{field} must be an object with type json_schema and a schema, got {quote(value)}", field)
    schema = value.get("schema")
    if not isinstance(schema, Mapping):
        refuse(f"{field}.schema must be a JSON schema, got {quote(schema)}", f"{field}.schema")
    return StructuredOutput("json_schema", json.dumps(schema, ensure_ascii=False))
