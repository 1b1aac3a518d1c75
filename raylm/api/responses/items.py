"""Input items: checked, given ids, and turned into the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn
from uuid import uuid4

from raylm.api.responses.wire import Item
from raylm.config.serving import HttpConfig
from raylm.errors import RequestRejected
from raylm.generation.quote import quote

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of content parts that are text, with the field that holds it."""


def read_input(value: object, limits: HttpConfig) -> list[Item]:
    """The field `input`: a text, or a list of items. Raises RequestRejected, naming the place, such as
    input[2].content."""
    if isinstance(value, str):
        return [_message({"role": "user", "content": value}, "input")]
    if not isinstance(value, list) or not value:
        _refuse(f"input must be a text or a list of items, got {quote(value)}", "input")
    if len(value) > limits.max_messages:
        _refuse(f"input has {len(value)} items, at most {limits.max_messages} are allowed", "input")
    items = [_item(one, f"input[{index}]") for index, one in enumerate(value)]
    num_parts = sum(len(item["content"]) for item in items if item["type"] == "message")
    if num_parts > limits.max_content_parts:
        _refuse(f"input has {num_parts} content parts, at most {limits.max_content_parts} are allowed", "input")
    return items


def _item(value: object, place: str) -> Item:
    if not isinstance(value, Mapping):
        _refuse(f"{place} must be an object, got {quote(value)}", place)
    kind = value.get("type", "message" if "role" in value else None)
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        known = ", ".join(_READERS)
        raise RequestRejected(
            f"{place}.type {quote(kind)} is not supported; this server has {known}",
            param=f"{place}.type",
            code="unsupported_item",
        )
    return reader(value, place)


def _message(value: Mapping[str, object], place: str) -> Item:
    role = value.get("role")
    if role not in ROLES:
        _refuse(f"{place}.role must be one of {', '.join(ROLES)}, got {quote(role)}", f"{place}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    content = value.get("content")
    if isinstance(content, str):
        parts: list[Item] = [{"type": kind, "text": content}]
    else:
        parts = _parts(content, f"{place}.content", kind)
    return {
        "type": "message",
        "id": _id(value, place, "msg"),
        "role": role,
        "content": parts,
        "status": "completed",
    }


def _parts(content: object, place: str, kind: str) -> list[Item]:
    if not isinstance(content, list):
        _refuse(f"{place} must be a text or a list of parts, got {quote(content)}", place)
    return [_part(part, f"{place}[{index}]", kind) for index, part in enumerate(content)]


def _part(part: object, place: str, kind: str) -> Item:
    given = part.get("type") if isinstance(part, Mapping) else None
    field = _TEXT_PARTS.get(given) if isinstance(given, str) else None
    if field is None or not isinstance(part, Mapping):
        raise RequestRejected(
            f"{place}.type must be input_text, output_text or refusal, since the model reads text alone, "
            f"got {quote(given)}",
            param=f"{place}.type",
            code="unsupported_content",
        )
    text = part.get(field)
    if not isinstance(text, str):
        _refuse(f"{place}.{field} must be a text, got {quote(text)}", f"{place}.{field}")
    if field == "refusal":
        return {"type": "refusal", "refusal": text}
    made: Item = {"type": kind, "text": text}
    return made if kind == "input_text" else made | {"annotations": [], "logprobs": []}


def _call(value: Mapping[str, object], place: str) -> Item:
    return {
        "type": "function_call",
        "id": _id(value, place, "fc"),
        "call_id": _text(value, "call_id", place),
        "name": _text(value, "name", place),
        "arguments": _text(value, "arguments", place),
        "status": "completed",
    }


def _call_output(value: Mapping[str, object], place: str) -> Item:
    output = value.get("output")
    return {
        "type": "function_call_output",
        "id": _id(value, place, "fco"),
        "call_id": _text(value, "call_id", place),
        "output": output if isinstance(output, str) else _parts(output, f"{place}.output", "input_text"),
        "status": "completed",
    }


def _reasoning(value: Mapping[str, object], place: str) -> Item:
    parts: dict[str, list[Item]] = {}
    for field, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        given = value.get(field) or []
        if not isinstance(given, list) or not all(isinstance(part, Mapping) for part in given):
            _refuse(f"{place}.{field} must be a list of parts, got {quote(given)}", f"{place}.{field}")
        parts[field] = [
            {"type": kind, "text": _text(part, "text", f"{place}.{field}[{index}]")} for index, part in enumerate(given)
        ]
    return {"type": "reasoning", "id": _id(value, place, "rs"), **parts, "status": "completed"}


def _remote_call(value: Mapping[str, object], place: str) -> Item:
    output, error = value.get("output"), value.get("error")
    return {
        "type": "mcp_call",
        "id": _id(value, place, "mcp"),
        "server_label": _text(value, "server_label", place),
        "name": _text(value, "name", place),
        "arguments": _text(value, "arguments", place),
        "output": output if output is None or isinstance(output, str) else json.dumps(output),
        "error": error if error is None or isinstance(error, str) else json.dumps(error),
        "status": "completed",
    }


def _remote_tools(value: Mapping[str, object], place: str) -> Item:
    label = _text(value, "server_label", place)
    return {"type": "mcp_list_tools", "id": _id(value, place, "mcpl"), "server_label": label, "tools": []}


def _approval_request(value: Mapping[str, object], place: str) -> Item:
    return {
        "type": "mcp_approval_request",
        "id": _id(value, place, "mcpr"),
        "server_label": _text(value, "server_label", place),
        "name": _text(value, "name", place),
        "arguments": _text(value, "arguments", place),
    }


def _approval(value: Mapping[str, object], place: str) -> Item:
    approve = value.get("approve")
    if not isinstance(approve, bool):
        _refuse(f"{place}.approve must be true or false, got {quote(approve)}", f"{place}.approve")
    return {
        "type": "mcp_approval_response",
        "id": _id(value, place, "mcpa"),
        "approval_request_id": _text(value, "approval_request_id", place),
        "approve": approve,
    }


_READERS: Mapping[str, Callable[[Mapping[str, object], str], Item]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
    "mcp_call": _remote_call,
    "mcp_list_tools": _remote_tools,
    "mcp_approval_request": _approval_request,
    "mcp_approval_response": _approval,
}


def messages_of(items: Iterable[Item], names: Mapping[tuple[str, str], str]) -> list[Item]:
    """The messages of a chat. What an assistant thought, said and called in a row is one message.

    names: what the model calls tools of MCP servers by, where it is not their own name: of a server's label and that.
    """
    messages = _Messages(names)
    for item in items:
        messages.add(item)
    return messages.done()


class _Messages:
    def __init__(self, names: Mapping[tuple[str, str], str]) -> None:
        self._names = names
        self._made: list[Item] = []
        self._own: Item | None = None
        """The assistant's message that is not yet complete."""
        self._requests: dict[str, Item] = {}
        """Calls that await the client's approval."""

    def add(self, item: Item) -> None:
        kind = item["type"]
        if kind == "message" and item["role"] == "assistant":
            self._say(item["content"])
        elif kind == "message":
            self._flush()
            self._made.append({"role": item["role"], "content": _content(item["content"])})
        elif kind == "reasoning":
            self._think(item)
        elif kind == "function_call":
            self._call(item["call_id"], item["name"], item["arguments"])
        elif kind == "function_call_output":
            self._answer(item["call_id"], item["output"])
        elif kind == "mcp_call":
            output = item.get("output")
            self._remote_call(item, output if output is not None else f"Error: {item.get('error')}")
        elif kind == "mcp_approval_request":
            self._requests[item["id"]] = item
        elif kind == "mcp_approval_response" and not item["approve"]:
            # One that is approved is followed by the call itself.
            request = self._requests.get(item["approval_request_id"])
            if request is not None:
                self._remote_call(request, "The user did not allow this call.")

    def done(self) -> list[Item]:
        self._flush()
        return self._made

    def _say(self, parts: list[Item]) -> None:
        if self._own is not None and ("content" in self._own or "tool_calls" in self._own):
            self._flush()
        self._message()["content"] = _content(parts)

    def _think(self, item: Item) -> None:
        text = "".join(part["text"] for part in item.get("content") or item["summary"])
        if self._own is not None:
            self._flush()
        if text:
            message = self._message()
            message["reasoning"] = message["reasoning_content"] = text

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._message().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _remote_call(self, item: Item, output: str) -> None:
        name = self._names.get((item["server_label"], item["name"]), item["name"])
        self._call(item["id"], name, item["arguments"])
        self._answer(item["id"], output)

    def _answer(self, call_id: str, output: object) -> None:
        self._flush()
        content = output if isinstance(output, str) else _content(output if isinstance(output, list) else [])
        self._made.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _message(self) -> Item:
        if self._own is None:
            self._own = {"role": "assistant"}
        return self._own

    def _flush(self) -> None:
        if self._own is not None:
            self._made.append({"content": None, **self._own})
            self._own = None


def _content(parts: Sequence[Item]) -> object:
    """One text as it is; several as the parts of a chat's message."""
    texts = [part[_TEXT_PARTS[part["type"]]] for part in parts]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _id(value: Mapping[str, object], place: str, prefix: str) -> str:
    given = value.get("id")
    if given is None:
        return f"{prefix}_{uuid4().hex}"
    if not isinstance(given, str):
        _refuse(f"{place}.id must be a text, got {quote(given)}", f"{place}.id")
    return given


def _text(value: Mapping[str, object], field: str, place: str) -> str:
    text = value.get(field)
    if not isinstance(text, str):
        _refuse(f"{place}.{field} must be a text, got {quote(text)}", f"{place}.{field}")
    return text


def _refuse(message: str, param: str) -> NoReturn:
    raise RequestRejected(message, param=param)
