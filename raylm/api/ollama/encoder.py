"""The answers of Ollama's /api/chat and /api/generate: one JSON object, or a line of JSON for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from raylm.api.arguments import as_object
from raylm.api.dialect import ollama_body
from raylm.api.errors import http_error
from raylm.api.wire import Reply
from raylm.generation.choices import ChoiceDelta, Tally, ToolCall, Whole
from raylm.generation.job import Job
from raylm.generation.lines import one_line
from raylm.generation.pieces import CallArguments, CallBegin, Reasoning, Text

Unset = msgspec.UnsetType


class Function(msgspec.Struct):
    index: int
    name: str
    arguments: msgspec.Raw


class Call(msgspec.Struct):
    id: str
    function: Function


class Message(msgspec.Struct):
    content: str
    role: str = "assistant"
    thinking: str | Unset = msgspec.UNSET
    tool_calls: list[Call] | Unset = msgspec.UNSET


class Line(msgspec.Struct):
    """message: of a chat. response, thinking: of a completion. The fields from done_reason on are in the last line;
    durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    message: Message | Unset = msgspec.UNSET
    response: str | Unset = msgspec.UNSET
    thinking: str | Unset = msgspec.UNSET
    done_reason: str | Unset = msgspec.UNSET
    total_duration: int | Unset = msgspec.UNSET
    load_duration: int | Unset = msgspec.UNSET
    prompt_eval_count: int | Unset = msgspec.UNSET
    prompt_eval_duration: int | Unset = msgspec.UNSET
    eval_count: int | Unset = msgspec.UNSET
    eval_duration: int | Unset = msgspec.UNSET


class OllamaForm(NamedTuple):
    """is_chat: the answer is a message, not a response."""

    is_chat: bool
    shows_thinking: bool


class _OpenCall(NamedTuple):
    """A call whose arguments are still coming."""

    begin: CallBegin
    arguments: list[str]


class OllamaEncoder:
    """Makes the answer to one request, which has one choice."""

    def __init__(self, reply: Reply, job: Job, form: OllamaForm) -> None:
        self._model = reply.model
        self._form = form
        self._call: _OpenCall | None = None
        self._reason = ""

    def opening(self) -> bytes:
        return b""

    def chunk(self, delta: ChoiceDelta, tally: Tally) -> bytes:
        """The lines of a delta. A call of a tool is one line, when it is complete."""
        lines = []
        for piece in delta.pieces_or_text():
            match piece:
                case CallArguments(_, text):
                    assert self._call is not None, "arguments belong to the call that began last"
                    self._call.arguments.append(text)
                case CallBegin():
                    lines.append(self._completed())
                    self._call = _OpenCall(piece, [])
                case Text(text):
                    lines += [self._completed(), self._line(text)]
                case Reasoning(text):
                    lines += [self._completed(), self._line("", text) if self._form.shows_thinking else b""]
        if delta.finish_reason is not None:
            lines.append(self._completed())
            self._reason = _reason(delta.finish_reason)
        return b"".join(lines)

    def closing(self, tally: Tally) -> bytes:
        return _encoded(self._ended(self._said("", None, []), self._reason, tally))

    def failed(self, error: Exception) -> bytes:
        """The line of a stream that ends with an error."""
        return one_line(ollama_body(http_error(error))) + b"\n"

    def answer(self, choices: Sequence[Whole], tally: Tally) -> bytes:
        """The JSON of an answer that is not streamed."""
        (whole,) = choices
        assert whole.finish_reason is not None, "a whole answer has ended"
        thinking = whole.reasoning if self._form.shows_thinking else None
        calls = [_called(index, call) for index, call in enumerate(whole.calls)]
        return msgspec.json.encode(
            self._ended(self._said(whole.text, thinking, calls), _reason(whole.finish_reason), tally)
        )

    def _said(self, text: str, thinking: str | None, calls: list[Call]) -> Line:
        """What was said, of an answer that goes on."""
        line = Line(self._model, timestamp(datetime.now(UTC)), done=False)
        thought = thinking or msgspec.UNSET
        if self._form.is_chat:
            line.message = Message(text, thinking=thought, tool_calls=calls or msgspec.UNSET)
        else:
            line.response, line.thinking = text, thought
        return line

    def _line(self, text: str, thinking: str | None = None) -> bytes:
        return _encoded(self._said(text, thinking, []))

    def _completed(self) -> bytes:
        """The line of the call that has come to its end; nothing where there is none."""
        own, self._call = self._call, None
        if own is None:
            return b""
        call = ToolCall(own.begin.id, own.begin.name, "".join(own.arguments))
        return _encoded(self._said("", None, [_called(own.begin.number, call)]))

    def _ended(self, line: Line, reason: str, tally: Tally) -> Line:
        counts, times = tally.counts(), tally.times()
        first = times.total_s if times.first_token_s is None else times.first_token_s
        line.done, line.done_reason = True, reason
        line.total_duration = _ns(times.total_s)
        line.load_duration = 0
        line.prompt_eval_count, line.prompt_eval_duration = counts.prompt, _ns(first)
        line.eval_count, line.eval_duration = counts.completion, _ns(times.total_s - first)
        return line


def timestamp(moment: datetime) -> str:
    """As Ollama writes it; `moment` is UTC's."""
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def loaded(model: str, *, is_chat: bool, unloads: bool) -> bytes:
    """The answer to a request without a prompt, by which clients load or unload a model."""
    line = Line(model, timestamp(datetime.now(UTC)), done=True, done_reason="unload" if unloads else "load")
    if is_chat:
        line.message = Message("")
    else:
        line.response = ""
    return msgspec.json.encode(line)


def _called(index: int, call: ToolCall) -> Call:
    return Call(call.id, Function(index, call.name, as_object(call.arguments)))


def _reason(finish_reason: str) -> str:
    return "length" if finish_reason == "length" else "stop"


def _encoded(line: Line) -> bytes:
    return one_line(msgspec.json.encode(line)) + b"\n"


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
