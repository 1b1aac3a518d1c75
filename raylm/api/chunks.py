"""What the events of OpenAI's streams hold. They are written piece by piece (chat_encoder.py, completions.py); these
types describe them."""

from __future__ import annotations

from typing import Literal

import msgspec

from raylm.api.protocol import FinishReason, StopReason, Timings, TokenIds, Usage

_Text = str | msgspec.UnsetType


class FunctionDelta(msgspec.Struct):
    """The name comes first, then the arguments' JSON in parts."""

    name: _Text = msgspec.UNSET
    arguments: _Text = msgspec.UNSET


class ToolDelta(msgspec.Struct):
    """Part of the call of this number; its id and name come with its first part."""

    index: int
    function: FunctionDelta
    id: _Text = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct):
    """What a choice gained."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: _Text = msgspec.UNSET
    reasoning: _Text = msgspec.UNSET
    reasoning_content: _Text = msgspec.UNSET
    tool_calls: list[ToolDelta] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionDelta | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    finish_reason: FinishReason
    logprobs: msgspec.Raw | None = None
    stop_reason: StopReason | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET


class TextChunkChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: FinishReason
    logprobs: msgspec.Raw | None = None
    stop_reason: StopReason | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """One event of a chat. The last one, where usage or timings are asked for, has no choices; `data: [DONE]` ends."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class TextChunk(msgspec.Struct):
    """The same of completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
