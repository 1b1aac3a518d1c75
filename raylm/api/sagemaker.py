"""SageMaker's two routes: /ping, and /invocations, whose body says what it asks for."""

from __future__ import annotations

import msgspec

from raylm.api.about import GENERATING, About
from raylm.api.answering import Draft
from raylm.api.call import Call
from raylm.api.completions import Completions
from raylm.api.openai_chat import OpenAIChat
from raylm.api.peek import peek
from raylm.api.protocol import ChatRequest, CompletionRequest
from raylm.errors import Overloaded, RequestRejected
from raylm.generation.served_model import ModelCatalog

_RETRY_S = 1.0


class Pong(msgspec.Struct):
    status: str = "ok"


ABOUT_PING = About("Whether every model has an engine.", "SageMaker", answer=Pong, errors=frozenset({503}))
ABOUT_INVOCATIONS = About(
    "A chat where the body has messages, completions where it has prompt; the answers are theirs.",
    "SageMaker",
    (ChatRequest, CompletionRequest),
    event=msgspec.Raw,
    errors=GENERATING,
)


class SageMaker:
    """What a container of SageMaker must answer."""

    def __init__(self, catalog: ModelCatalog, chat: OpenAIChat, completions: Completions) -> None:
        self._catalog = catalog
        self._chat = chat
        self._completions = completions

    async def ping(self, call: Call) -> bytes:
        """Raises Overloaded while a model has no engine."""
        if not self._catalog.ready():
            raise Overloaded("A model has no engine", retry_after=_RETRY_S)
        return msgspec.json.encode(Pong())

    def parse(self, call: Call) -> Draft:
        """A chat, or completions of a prompt."""
        given = peek(call.body)
        if given.has_messages and given.has_prompt:
            raise RequestRejected("prompt is not allowed together with messages", param="prompt")
        if given.has_prompt:
            return self._completions.parse(call)
        if given.has_input and not given.has_messages:
            raise RequestRejected(
                "input is not supported at /invocations: it takes messages (a chat) or prompt (completions)",
                param="input",
                code="unsupported_parameter",
            )
        # Of a body with neither the chat says what is missing.
        return self._chat.parse(call)
