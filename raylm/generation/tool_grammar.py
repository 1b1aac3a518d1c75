"""The grammar of an answer that calls tools, where a request asks for more than the model's good will."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected
from raylm.generation.parsing.families import ModelFormat
from raylm.generation.parsing.formats import CallFormat
from raylm.generation.tools import Tool, ToolUse
from raylm.grammar.calls import CallsForm, CallTool
from raylm.grammar.parameters import ParameterTags

_OTHER_JSON_CALLS = ('{ "name"', '{"type": "function"')
"""Other beginnings of a call as a bare JSON object, which a text with strict tools must not have."""
_FINAL = "<|channel|>final<|message|>"
_CHANNELS = ("analysis<|message|>", "final<|message|>", "commentary<|message|>")


def tool_structure(
    use: ToolUse, form: ModelFormat, *, end_of_thinking: Sequence[int] = (), answer: StructuredOutput | None = None
) -> StructuredOutput | None:
    """What must be enforced of the answer, for a GrammarCompiler; None where nothing must.

    With the choice "required" the answer is calls, with "named" one call of that tool. With "auto" it is free text; if
    a tool is strict, or only one call or some of the tools are allowed, what begins a call must go on as one of these.
    `answer` is the structure that the request wants of an answer without calls: with "auto" the answer is then either.

    end_of_thinking: the token ids of the mark that ends the thinking, where the prompt has begun it.

    Raises RequestRejected(param="tool_choice" or "tools") where the model writes no calls that are known.
    """
    tools = use.callable_tools
    kind = use.choice.kind
    if kind == "none" or not tools:
        return answer
    is_forced = kind in ("required", "named")
    # The older fields allow one call at most, with models too whose format is not known.
    is_less = not use.choice.parallel or len(tools) < len(use.tools)
    is_bound = any(tool.strict for tool in tools) or (is_less and form.calls is not None)
    if not is_forced and answer is None and not is_bound:
        return None
    if form.calls is None:
        param, what = ("tool_choice", kind) if is_forced else ("tools", "strict or a structure of the answer")
        raise RequestRejected(
            f"{param}: {what} needs a model whose tool calls have a known format; this one's is not known (chat.tools)",
            param=param,
        )
    made = _calls_form(use, tools, form, thinks=bool(end_of_thinking))
    if is_forced:
        pass
    elif answer is not None:
        begin = _FINAL if form.calls.style == "harmony" else ""
        made = msgspec.structs.replace(made, answer=(answer.kind, answer.value), answer_begin=begin)
    else:
        made = _among_text(made, form.calls)
    begin_after = tuple(end_of_thinking) or (() if answer is None else answer.begin_after)
    return StructuredOutput("tool_calls", msgspec.json.encode(made).decode(), begin_after)


def _calls_form(use: ToolUse, tools: Sequence[Tool], form: ModelFormat, *, thinks: bool) -> CallsForm:
    """`thinks`: the grammar begins after the thinking."""
    calls, reasoning = form.calls, form.reasoning
    assert calls is not None, "the model's calls are known"
    is_harmony = calls.style == "harmony"
    thinking = None
    if reasoning is not None and not thinks:
        thinking = (reasoning.begin[0], reasoning.end[0], calls.separator if is_harmony else "")
    return CallsForm(
        arguments=calls.arguments,
        tools=[_call_tool(use, tool) for tool in tools],
        before_name=calls.before_name,
        after_name=calls.after_name,
        call_end=calls.call_end,
        section=calls.section,
        separator=calls.separator,
        tags=_tags(calls),
        several=use.choice.parallel and use.choice.kind != "named",
        numbered=calls.ids == "kimi",
        thinking=thinking,
        line_ends=reasoning is not None and not is_harmony,
    )


def _call_tool(use: ToolUse, tool: Tool) -> CallTool:
    schema = {"type": "object", "properties": {}} if tool.parameters is None else {"type": "object", **tool.parameters}
    index = use.tools.index(tool)
    place = f"functions[{index}].parameters" if use.legacy else f"tools[{index}].function.parameters"
    return CallTool(tool.name, json.dumps(schema, ensure_ascii=False), tool.strict, place)


def _tags(calls: CallFormat) -> ParameterTags | None:
    tags = calls.tags
    if tags is None:
        return None
    # A reader takes each of these for the end of a value.
    marks = (tags.value_end.strip(), tags.key_begin, *calls.closes)
    avoid = tuple(mark for mark in marks if mark != tags.value_end)
    return ParameterTags(tags.key_begin, tags.key_end, tags.value_begin, tags.value_end, tags.between, avoid)


def _among_text(made: CallsForm, calls: CallFormat) -> CallsForm:
    """The form with the texts that begin calls in free text."""
    if calls.style == "harmony":
        return msgspec.structs.replace(made, triggers=[calls.opens[0]], other_channels=list(_CHANNELS))
    if calls.bare == "{":
        return msgspec.structs.replace(made, triggers=['{"name"'], excluded=list(_OTHER_JSON_CALLS))
    if calls.bare:
        return msgspec.structs.replace(made, triggers=[calls.bare], at_start=True)
    return msgspec.structs.replace(made, triggers=list(calls.opens))
