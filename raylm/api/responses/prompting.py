"""From a request and what went before it to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raylm.api.chats import opened_chat
from raylm.api.identity import Identity
from raylm.api.params import Asking
from raylm.api.responses.items import messages_of
from raylm.api.responses.open_items import RemoteTool
from raylm.api.responses.request import ResponsesRequest, asking_of
from raylm.api.responses.wire import Item
from raylm.generation.chat import Chat, OpenedChat
from raylm.generation.reader import Reading
from raylm.generation.served_model import ServedModel
from raylm.generation.tools import ChoiceKind, ToolUse
from raylm.text.chat_options import ChatOptions
from raylm.text.tokenizer import TooManyTokens

FIELD = "input"
"""What is said to be wrong with a prompt is wrong with this field."""


class Asked(NamedTuple):
    """All that a response is made from. items: what it continues and its own input, in order. remote: the tools of MCP
    servers, by the names that the model calls."""

    fields: ResponsesRequest
    model: ServedModel
    identity: Identity
    items: Sequence[Item]
    tools: ToolUse
    remote: Mapping[str, RemoteTool]


class Prompt(NamedTuple):
    """A prompt's text, what is asked of the engine, and how its answer becomes pieces."""

    text: str
    asked: Asking
    reading: Reading | None


def prompt_of(asked: Asked, more: Sequence[Item] = (), *, choice: ChoiceKind | None = None) -> Prompt:
    """The prompt of a request, with `more` items behind its own; `choice` of tools instead of the request's. Raises
    RequestRejected."""
    if choice is not None:
        asked = asked._replace(tools=replace(asked.tools, choice=replace(asked.tools.choice, kind=choice, name="")))
    names = {(tool.server, tool.name): name for name, tool in asked.remote.items()}
    opening = _Opening(asked, messages_of([*asked.items, *more], names))
    dropped = opening.fewest_dropped() if asked.fields.truncation == "auto" else 0
    chat, asking = opening.opened(dropped)
    return Prompt(chat.text, asking, chat.reading)


class _Opening:
    """Opens the chat with some of its messages left out."""

    def __init__(self, asked: Asked, messages: Sequence[Item]) -> None:
        fields = asked.fields
        self._model = asked.model
        self._tools = asked.tools
        self._asking = asking_of(fields, asked.model.sampling, asked.identity)
        self._messages = messages
        effort = None if fields.reasoning is None else fields.reasoning.effort
        self._options = ChatOptions(reasoning_effort=effort, kwargs=fields.chat_template_kwargs or {})
        self._fixed = [] if fields.instructions is None else [{"role": "system", "content": fields.instructions}]
        self._room = asked.model.max_model_len - (fields.max_output_tokens or 1)

    def opened(self, dropped: int) -> tuple[OpenedChat, Asking]:
        """The chat without the first `dropped` messages; what the system says stays."""
        kept = [
            message
            for index, message in enumerate(self._messages)
            if index >= dropped or message["role"] in ("system", "developer")
        ]
        return opened_chat(self._model, Chat([*self._fixed, *kept], self._options, self._tools), self._asking)

    def fewest_dropped(self) -> int:
        """How many messages must go so that the prompt fits; it then begins with a user's. Where nothing is enough, all
        but the last turn."""
        cuts = [0, *(index for index, message in enumerate(self._messages) if index and message["role"] == "user")]
        low, high = 0, len(cuts) - 1
        while low < high:
            middle = (low + high) // 2
            if self._fits(cuts[middle]):
                high = middle
            else:
                low = middle + 1
        return cuts[low]

    def _fits(self, dropped: int) -> bool:
        text = self.opened(dropped)[0].text
        try:
            ids = self._model.text.encode(text, add_special_tokens=False, max_tokens=max(1, self._room))
        except TooManyTokens:
            return False
        return len(ids) <= self._room
