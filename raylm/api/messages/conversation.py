"""Anthropic's `system` and `messages` as messages that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raylm.api.messages.blocks import Block, blocks, refuse, texts
from raylm.generation.quote import quote
from raylm.text.chat import Message

_USER_KINDS = ("text", "tool_result")
_ASSISTANT_KINDS = ("text", "tool_use", "thinking", "redacted_thinking")
ERROR_MARK = "Error: "
"""Before a tool's result that is an error: the messages of chat templates have no field for that."""


class Conversation(NamedTuple):
    """is_open: its last message is an assistant's, which the answer goes on from."""

    messages: Sequence[Message]
    is_open: bool


def read_conversation(system: object, messages: Sequence[object]) -> Conversation:
    """Raises RequestRejected, naming the place, such as messages[2].content[0].text."""
    reader = _Reader()
    reader.system(texts(system, "system"))
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            refuse(f"{place} must be an object with role and content, got {quote(message)}", place)
        role, content = message.get("role"), message.get("content")
        if role == "user":
            reader.user(content, f"{place}.content")
        elif role == "assistant":
            reader.assistant(content, f"{place}.content")
        elif role == "system":
            reader.system(texts(content, f"{place}.content"))
        else:
            refuse(f"{place}.role must be user, assistant or system, got {quote(role)}", f"{place}.role")
    return reader.conversation(f"messages[{len(messages) - 1}]")


class _Turn(NamedTuple):
    """What one or several messages of a role in a row say: together they are one turn."""

    role: str
    texts: list[str]
    thinking: list[str]
    calls: list[dict[str, object]]


class _Reader:
    """Takes messages, one after the other."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._turn: _Turn | None = None
        self._tools: dict[str, str] = {}
        """The tool that each tool_use block called."""

    def system(self, parts: list[str]) -> None:
        if parts:
            self._of("system").texts.extend(parts)

    def user(self, content: object, place: str) -> None:
        for block in blocks(content, place, _USER_KINDS):
            if block.kind == "text":
                self._of("user").texts.append(block.text("text"))
            else:
                self._end()
                self._messages.append(self._result(block))

    def assistant(self, content: object, place: str) -> None:
        turn = self._of("assistant")
        for block in blocks(content, place, _ASSISTANT_KINDS):
            if block.kind == "text":
                turn.texts.append(block.text("text"))
            elif block.kind == "thinking":
                turn.thinking.append(block.text("thinking"))
            elif block.kind == "tool_use":
                turn.calls.append(self._call(block))

    def conversation(self, last: str) -> Conversation:
        """All messages. `last` is the place of the last one."""
        turn = self._turn
        is_open = turn is not None and turn.role == "assistant"
        if is_open and turn is not None and turn.calls:
            refuse(f"{last} calls tools, and no message with their results (tool_result) comes after it", "messages")
        self._end()
        return Conversation(self._messages, is_open)

    def _of(self, role: str) -> _Turn:
        """The turn that a message of this role belongs to."""
        if self._turn is None or self._turn.role != role:
            self._end()
            self._turn = _Turn(role, [], [], [])
        return self._turn

    def _end(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._messages.append(_message(turn))

    def _call(self, block: Block) -> dict[str, object]:
        name, arguments = block.text("name", empty=False), block.fields.get("input")
        if not isinstance(arguments, Mapping):
            refuse(f"{block.place}.input must be an object, got {quote(arguments)}", f"{block.place}.input")
        own_id = block.text("id", empty=False)
        self._tools[own_id] = name
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {"id": own_id, "type": "function", "function": function}

    def _result(self, block: Block) -> Message:
        used = block.text("tool_use_id", empty=False)
        is_error = block.fields.get("is_error")
        if is_error is not None and not isinstance(is_error, bool):
            refuse(f"{block.place}.is_error must be true or false, got {quote(is_error)}", f"{block.place}.is_error")
        text = "\n".join(texts(block.fields.get("content"), f"{block.place}.content"))
        message = {"role": "tool", "tool_call_id": used, "content": (ERROR_MARK if is_error else "") + text}
        return {**message, "name": self._tools[used]} if used in self._tools else message


def _message(turn: _Turn) -> Message:
    """One text is a string; several are parts, which a template gets as it likes them."""
    parts = turn.texts
    content = "".join(parts) if len(parts) < 2 else [{"type": "text", "text": text} for text in parts]
    message: dict[str, object] = {"role": turn.role, "content": content}
    if turn.thinking:
        message["reasoning_content"] = "\n".join(turn.thinking)
    if turn.calls:
        message["tool_calls"] = turn.calls
    return message
