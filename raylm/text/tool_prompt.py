"""Tools for a chat template that does not know them: told in the system message, in the format of Hermes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from raylm.text.messages import TextPart, ToolCall, Turn

_INTRODUCTION = """You may call functions to answer. Each line between <tools> and </tools> describes one, as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and arguments as one JSON object between these tags, once for each call:
<tool_call>
{{"name": "<its name>", "arguments": {{<its arguments>}}}}
</tool_call>
The results follow between <tool_response> and </tool_response>."""


def tell_tools(turns: Sequence[Turn], tools: Sequence[Mapping[str, object]]) -> list[Turn]:
    """The conversation with the tools at the end of its first system message; a new one where it begins otherwise."""
    text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = turns[0]
    if first.role not in ("system", "developer"):
        return [Turn("system", [TextPart(text)]), *turns]
    whole = f"{first.text}\n\n{text}" if first.text else text
    return [replace(first, parts=[TextPart(whole)], is_string=True), *turns[1:]]


def tell_calls(turns: Sequence[Turn]) -> list[Turn]:
    """The conversation with calls as text of the assistant's."""
    return [_told(turn) if turn.calls else turn for turn in turns]


def tell_results(turns: Sequence[Turn]) -> list[Turn]:
    """The conversation with results of calls as the user's: one turn for results that follow each other."""
    told: list[Turn] = []
    follows_result = False
    for turn in turns:
        if turn.role == "tool":
            text = f"<tool_response>\n{turn.text}\n</tool_response>"
            if follows_result:
                text = f"{told.pop().text}\n{text}"
            told.append(Turn("user", [TextPart(text)]))
        else:
            told.append(turn)
        follows_result = turn.role == "tool"
    return told


def _told(turn: Turn) -> Turn:
    text = "\n".join([turn.text] * bool(turn.text) + [_as_text(call) for call in turn.calls])
    return replace(turn, parts=[TextPart(text)], is_string=True, calls=[])


def _as_text(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
