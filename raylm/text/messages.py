"""Messages of a conversation as clients send them, checked and brought into one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as brief
from typing import NamedTuple, NoReturn

from raylm.errors import RequestRejected

Message = Mapping[str, object]
"""{"role": str, "content": str or a list of parts such as {"type": "text", "text": str}}, and whatever else a template
reads. An assistant's content may be None or missing."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of a part that are text, with the field that holds it."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients and templates have an assistant's reasoning; the first that is given counts."""
_OWN_FIELDS = frozenset({"role", "content", "refusal", "tool_calls", "function_call", *_REASONING})
_MAX_ARGUMENT_VALUES = 32_768
_JSON_TYPES = (str, int, float, bool)


class TextPart(NamedTuple):
    """A part of a content that is text, the only type of part that models read so far."""

    text: str


Part = TextPart


class ToolCall(NamedTuple):
    """One call of an assistant's turn. `arguments` is JSON's object."""

    id: str
    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message, checked.

    is_string: the content came as one string, not as parts.
    rest: the message's other fields, such as name and tool_call_id; made of JSON's types alone.
    """

    role: str
    parts: list[Part]
    is_string: bool = True
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    rest: dict[str, object] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The content as one string: a line end stands between two parts, as with vLLM."""
        return "\n".join(part.text for part in self.parts)


def checked(messages: Sequence[Message]) -> list[Turn]:
    """Raises RequestRejected(param="messages") naming the place. A "function" message becomes a "tool" message and a
    function_call one of tool_calls: what OpenAI once called so."""
    if not messages:
        reject("messages must hold at least one message, got none")
    return [_turn(message, index) for index, message in enumerate(messages)]


def plain(value: object, where: str, *, param: str = "messages") -> object:
    """A copy made of JSON's types alone, so that a template gets no object with methods of its own.

    Raises RequestRejected.
    """
    if value is None or type(value) in _JSON_TYPES:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}", param=param) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]", param=param) for index, item in enumerate(value)]
    raise RequestRejected(f"{where} must be a value of JSON, got {brief(value)}", param=param)


def reject(message: str) -> NoReturn:
    raise RequestRejected(message, param="messages")


def _turn(message: Message, index: int) -> Turn:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        reject(f"{where} must be an object with role and content, got {brief(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        reject(f"{where}.role must be a non-empty string, got {brief(role)}")
    content = message.get("content")
    rest = {
        name: plain(value, f"{where}.{name}")
        for name, value in message.items()
        if name not in _OWN_FIELDS and value is not None
    }
    if role == "assistant":
        return _answer(message, index, rest)
    is_string = isinstance(content, str)
    parts = _parts(content, f"{where}.content")
    return Turn("tool" if role == "function" else role, parts, is_string, rest=_answers_call(role, index, rest))


def _answers_call(role: str, index: int, rest: dict[str, object]) -> dict[str, object]:
    """A function's message with the id that its call has got: the message before it is the call."""
    return {"tool_call_id": _legacy_id(index - 1), **rest} if role == "function" else rest


def _answer(message: Message, index: int, rest: dict[str, object]) -> Turn:
    where = f"messages[{index}]"
    content, refusal = message.get("content"), message.get("refusal")
    is_string = content is None or isinstance(content, str)
    parts = [] if content is None else _parts(content, f"{where}.content")
    if isinstance(refusal, str) and refusal:
        is_string = not parts
        parts.append(TextPart(refusal))
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None and not isinstance(reasoning, str):
        reject(f"{where}.reasoning must be a string, got {brief(reasoning)}")
    return Turn("assistant", parts, is_string, reasoning, _calls(message, index), rest)


def _parts(content: object, where: str) -> list[Part]:
    if isinstance(content, str):
        return [TextPart(content)]
    if not isinstance(content, list | tuple):
        reject(f"{where} must be a string or a list of text parts, got {brief(content)}")
    parts: list[Part] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            reject(f"{where}[{index}] must be a part of type 'text' (the model reads text only), got {brief(kind)}")
        text = part.get(name)
        if not isinstance(text, str):
            reject(f"{where}[{index}].{name} must be a string, got {brief(text)}")
        parts.append(TextPart(text))
    return parts


def _calls(message: Message, index: int) -> list[ToolCall]:
    where = f"messages[{index}]"
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        reject(f"{where}.tool_calls must be a list, got {brief(calls)}")
    found = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    if (legacy := message.get("function_call")) is not None and not found:
        name, arguments = _function(legacy, f"{where}.function_call")
        found = [ToolCall(_legacy_id(index), name, arguments)]
    return found


def _legacy_id(index: int) -> str:
    # Nine letters and digits: Mistral's templates refuse others.
    return f"call{index:05d}"


def _call(call: object, where: str) -> ToolCall:
    if not isinstance(call, Mapping):
        reject(f"{where} must be an object, got {brief(call)}")
    if call.get("type", "function") != "function":
        reject(f"{where}.type must be 'function', got {brief(call.get('type'))}")
    call_id = call.get("id", "")
    if not isinstance(call_id, str):
        reject(f"{where}.id must be a string, got {brief(call_id)}")
    return ToolCall(call_id, *_function(call.get("function"), f"{where}.function"))


def _function(function: object, where: str) -> tuple[str, dict[str, object]]:
    if not isinstance(function, Mapping):
        reject(f"{where} must be an object with name and arguments, got {brief(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        reject(f"{where}.name must be a non-empty string, got {brief(name)}")
    return name, _arguments(function.get("arguments"), f"{where}.arguments")


def _arguments(given: object, where: str) -> dict[str, object]:
    """Arguments as an object: templates write it as each family does. None and an empty text are no arguments."""
    if given is None or given == "":
        return {}
    read = _read_json(given, where) if isinstance(given, str) else plain(given, where)
    if not isinstance(read, dict):
        reject(f"{where} must be an object, or its JSON, got {brief(given)}")
    return read


def _read_json(text: str, where: str) -> object:
    if (count := text.count(",") + text.count("[") + text.count("{")) > _MAX_ARGUMENT_VALUES:
        reject(f"{where} holds about {count} values, at most {_MAX_ARGUMENT_VALUES} are allowed")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        reject(f"{where} is not valid JSON: {reason}, got {brief(text)}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
