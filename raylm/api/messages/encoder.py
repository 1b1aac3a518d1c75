"""The answer to Anthropic's /v1/messages: as one JSON value, or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from raylm.api.arguments import as_object
from raylm.api.dialect import anthropic_body
from raylm.api.errors import http_error
from raylm.api.wire import Reply
from raylm.generation.choices import ChoiceDelta, Counts, Tally, Whole
from raylm.generation.job import Job
from raylm.generation.lines import one_line
from raylm.generation.pieces import CallArguments, CallBegin, Piece, Reasoning, Text

encode = msgspec.json.Encoder().encode
BlockKind = Literal["text", "thinking", "tool_use"]


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class Usage(msgspec.Struct):
    """Tokens; those of the prompt that were in the prefix cache are cache_read_input_tokens and no input_tokens."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_creation_input_tokens: int = 0


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, tag="message"):
    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    role: str = "assistant"


class MessageForm(NamedTuple):
    """What the request says of its answer.

    max_tokens: the request's; the job's are fewer where the model has no room for as many.
    has_thinking: what the model thinks becomes blocks. shows_thinking: these have its text.
    """

    max_tokens: int
    has_thinking: bool
    shows_thinking: bool


class MessageEncoder:
    """Makes the answer to one request, which has one choice."""

    def __init__(self, reply: Reply, job: Job, form: MessageForm) -> None:
        self._reply = reply
        self._form = form
        self._prompt_tokens = job.prompt_tokens
        self._is_cut = job.prompts[0].params.max_tokens != form.max_tokens
        self._index = -1
        self._open: BlockKind | None = None
        self._space = ""
        """White space that may be the beginning of a text."""
        self._end: tuple[str | None, str | None] = (None, None)

    def opening(self) -> bytes:
        """The message without content. How much of the prompt was cached is not known before the first token: the last
        event says it."""
        reply = self._reply
        empty = Message(reply.id, reply.model, [], None, None, _usage(Counts(self._prompt_tokens)))
        start = b'{"type":"message_start","message":' + encode(empty) + b"}"
        return _event(b"message_start", start) + _event(b"ping", b'{"type":"ping"}')

    def chunk(self, delta: ChoiceDelta, tally: Tally) -> bytes:
        """The events of a delta; empty when they would say nothing new."""
        events = b"".join(map(self._gained, delta.pieces_or_text()))
        if delta.finish_reason is not None:
            if self._index < 0 and self._space:
                # White space is all that the model has said.
                events += self._said(self._space)
            self._end = self._stop(delta.finish_reason, delta.stop_reason)
        return events

    def closing(self, tally: Tally) -> bytes:
        reason, sequence = map(encode, self._end)
        delta = b'{"stop_reason":' + reason + b',"stop_sequence":' + sequence + b"}"
        usage = encode(_usage(tally.counts()))
        last = _event(b"message_delta", b'{"type":"message_delta","delta":' + delta + b',"usage":' + usage + b"}")
        return self._close() + last + _event(b"message_stop", b'{"type":"message_stop"}')

    def failed(self, error: Exception) -> bytes:
        """The event of a stream that ends with an error."""
        return _event(b"error", anthropic_body(http_error(error)))

    def answer(self, choices: Sequence[Whole], tally: Tally) -> bytes:
        """The JSON of an answer that is not streamed."""
        reply, (whole,) = self._reply, choices
        content: list[AnswerBlock] = []
        if whole.reasoning is not None and self._form.has_thinking:
            shown = whole.reasoning if self._form.shows_thinking else ""
            content.append(ThinkingBlock(shown, self._signature()))
        if whole.text and (not whole.text.isspace() or not (content or whole.calls)):
            content.append(TextBlock(whole.text))
        content += [ToolUseBlock(call.id, call.name, as_object(call.arguments)) for call in whole.calls]
        assert whole.finish_reason is not None, "a whole answer has ended"
        reason, sequence = self._stop(whole.finish_reason, whole.stop_reason)
        return encode(Message(reply.id, reply.model, content, reason, sequence, _usage(tally.counts())))

    def _stop(self, finish_reason: str, stop: str | int | None) -> tuple[str, str | None]:
        """Anthropic's stop_reason and stop_sequence."""
        if finish_reason == "tool_calls":
            return "tool_use", None
        if finish_reason == "length":
            return ("model_context_window_exceeded" if self._is_cut else "max_tokens"), None
        return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)

    def _gained(self, piece: Piece) -> bytes:
        match piece:
            case Text(text):
                return self._spoken(text)
            case Reasoning(text):
                return self._thought(text) if self._form.has_thinking else b""
            case CallBegin(_, own_id, name):
                start = b'{"type":"tool_use","id":' + encode(own_id) + b',"name":' + encode(name) + b',"input":{}}'
                return self._close() + self._begin("tool_use", start)
            case CallArguments(_, text):
                return self._delta(b"input_json_delta", b"partial_json", text)

    def _spoken(self, text: str) -> bytes:
        """White space between thinking, calls and text makes no block of its own."""
        if self._open != "text":
            self._space += text
            text = self._space
            if text.isspace() or not text:
                return b""
        return self._said(text)

    def _said(self, text: str) -> bytes:
        self._space = ""
        return self._begin("text", _EMPTY_TEXT) + self._delta(b"text_delta", b"text", text)

    def _thought(self, text: str) -> bytes:
        begin = self._begin("thinking", _EMPTY_THINKING)
        return begin + (self._delta(b"thinking_delta", b"thinking", text) if self._form.shows_thinking else b"")

    def _begin(self, kind: BlockKind, start: bytes) -> bytes:
        """The events that make a block of this kind the open one; none where it is."""
        if self._open == kind:
            return b""
        end = self._close()
        self._index += 1
        self._space = ""
        self._open = kind
        head = b'{"type":"content_block_start","index":%d,"content_block":' % self._index
        return end + _event(b"content_block_start", head + start + b"}")

    def _close(self) -> bytes:
        """The events that end the open block; none where there is none."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = self._delta(b"signature_delta", b"signature", self._signature()) if kind == "thinking" else b""
        end = b'{"type":"content_block_stop","index":%d}' % self._index
        return signed + _event(b"content_block_stop", end)

    def _delta(self, kind: bytes, field: bytes, text: str) -> bytes:
        head = b'{"type":"content_block_delta","index":%d,"delta":{"type":"' % self._index
        return _event(b"content_block_delta", head + kind + b'","' + field + b'":' + encode(text) + b"}}")

    def _signature(self) -> str:
        """Clients give it back with the block; nobody looks at it here."""
        return self._reply.id


_EMPTY_TEXT = b'{"type":"text","text":""}'
_EMPTY_THINKING = b'{"type":"thinking","thinking":"","signature":""}'


def _event(kind: bytes, data: bytes) -> bytes:
    return b"event: " + kind + b"\ndata: " + one_line(data) + b"\n\n"


def _usage(counts: Counts) -> Usage:
    return Usage(counts.prompt - counts.cached, counts.cached, counts.completion, ThinkingTokens(counts.reasoning))
