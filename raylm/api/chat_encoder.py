"""The answer to a chat: as one JSON value, or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from raylm.api.frame import Frame, encode, reason, text
from raylm.api.params import AnswerForm
from raylm.api.protocol import CalledFunction, CalledTool, ChatAnswer, ChatChoice, Completion
from raylm.api.wire import FINGERPRINT, Reply, timings_of, usage_of
from raylm.generation.choices import ChoiceDelta, Tally, Whole
from raylm.generation.job import Job
from raylm.generation.lines import one_line
from raylm.generation.listing import field
from raylm.generation.pieces import CallArguments, CallBegin, Piece, Reasoning, Text


class ChatEncoder:
    """Makes the answer to one chat."""

    def __init__(
        self, reply: Reply, job: Job, form: AnswerForm, *, is_legacy: bool = False, shows_reasoning: bool = True
    ) -> None:
        """is_legacy: the request has `functions` instead of `tools`, so the model calls one at most. shows_reasoning:
        the answer has what the model thought."""
        self._reply = reply
        self._form = form
        self._is_legacy = is_legacy
        self._shows_reasoning = shows_reasoning
        self._frame = Frame(reply, "chat.completion.chunk", form)
        self._prompt_ids = job.prompts[0].prompt_ids
        self._heads = [f'{self._frame.start}{index},"delta":{{'.encode() for index in range(job.num_sequences)]

    def opening(self) -> bytes:
        """The events before the first token: who speaks, for each choice."""
        end = self._frame.end
        role = b'"role":"assistant","content":""' + _REASON + b"null"
        first, *others = self._heads
        first_end = end
        if self._form.token_ids:
            # A chat has one prompt: its tokens are in the first event.
            first_end = end.replace(b"]", b'],"prompt_token_ids":' + encode(self._prompt_ids), 1)
        return first + role + first_end + b"".join(head + role + end for head in others)

    def chunk(self, delta: ChoiceDelta, tally: Tally) -> bytes:
        """The events of a delta; empty when they would say nothing new."""
        ids = b',"token_ids":' + encode(delta.token_ids) if self._form.token_ids and delta.token_ids else b""
        entries = delta.entries if delta.entries and delta.entries[0] else None
        if delta.pieces is None:
            gained = [b'"content":' + text(delta.text)] if delta.text else []
        else:
            gained = [self._gained(run) for run in _runs(self._shown(delta.pieces))]
        if not gained:
            if delta.finish_reason is None and not ids and entries is None:
                return b""
            gained = [b'"content":""' if delta.pieces is None else b""]
        before = _REASON if entries is None else _REASON.replace(b"null", one_line(field(entries)), 1)
        head, end = self._heads[delta.choice], self._frame.end_of(tally)
        earlier = [head + part + _REASON + b"null" + end for part in gained[:-1]]
        return b"".join(earlier) + head + gained[-1] + before + self._reason(delta) + ids + end

    def closing(self, tally: Tally) -> bytes:
        return self._frame.closing(tally)

    def failed(self, error: Exception) -> bytes:
        return self._frame.failed(error)

    def answer(self, choices: Sequence[Whole], tally: Tally) -> bytes:
        """The JSON of an answer that is not streamed."""
        reply, form = self._reply, self._form
        first = choices[0]
        return encode(
            Completion(
                reply.id,
                "chat.completion",
                reply.created,
                reply.model,
                [self._choice(index, whole) for index, whole in enumerate(choices)],
                usage_of(tally.counts()),
                FINGERPRINT,
                first.prompt_ids if form.token_ids else msgspec.UNSET,
                msgspec.UNSET if first.prompt_list is None else msgspec.Raw(first.prompt_list),
                timings_of(tally, wanted=form.timings),
            )
        )

    def _choice(self, index: int, whole: Whole) -> ChatChoice:
        calls = [CalledTool(call.id, CalledFunction(call.name, call.arguments)) for call in whole.calls]
        answer = ChatAnswer(whole.text or None if calls else whole.text)
        if whole.reasoning is not None and self._shows_reasoning:
            answer.reasoning = answer.reasoning_content = whole.reasoning
        finish_reason = whole.finish_reason
        if calls and self._is_legacy:
            answer.function_call = calls[0].function
            finish_reason = _legacy(finish_reason)
        elif calls:
            answer.tool_calls = calls
        entries = whole.entries
        return ChatChoice(
            index,
            answer,
            finish_reason,
            None if entries is None else msgspec.Raw(field(entries)),
            whole.stop_reason,
            whole.token_ids if self._form.token_ids else msgspec.UNSET,
        )

    def _shown(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return [piece for piece in pieces if self._shows(piece)]

    def _shows(self, piece: Piece) -> bool:
        if isinstance(piece, Reasoning):
            return self._shows_reasoning
        # `functions` allow one call.
        return isinstance(piece, Text) or not self._is_legacy or piece.number == 0

    def _gained(self, run: list[Piece]) -> bytes:
        """Fields of an event's `delta`, of pieces of one kind."""
        first = run[0]
        if isinstance(first, Text):
            return b'"content":' + text("".join(piece.text for piece in run if isinstance(piece, Text)))
        if isinstance(first, Reasoning):
            thought = text("".join(piece.text for piece in run if isinstance(piece, Reasoning)))
            return b'"reasoning":' + thought + b',"reasoning_content":' + thought
        if self._is_legacy:
            return b'"function_call":' + _function(run)
        return b'"tool_calls":[' + _call(run) + b"]"

    def _reason(self, delta: ChoiceDelta) -> bytes:
        if self._is_legacy:
            delta = delta._replace(finish_reason=_legacy(delta.finish_reason))
        return reason(delta)


_REASON = b'},"logprobs":null,"finish_reason":'


def _legacy(finish_reason: str | None) -> str | None:
    return "function_call" if finish_reason == "tool_calls" else finish_reason


def _runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces of one kind, and of one call, one behind the other, together: what one event can say. Some clients read
    the first entry alone of an event's `tool_calls`."""
    runs: list[list[Piece]] = []
    kind: int | type[Piece] | None = None
    for piece in pieces:
        own = piece.number if isinstance(piece, CallBegin | CallArguments) else type(piece)
        if own != kind:
            runs.append([])
            kind = own
        runs[-1].append(piece)
    return runs


def _call(run: list[Piece]) -> bytes:
    """The entry of `tool_calls` for what came of one call: its id and name where it begins here, its arguments."""
    first = run[0]
    assert isinstance(first, CallBegin | CallArguments), "text and reasoning are no parts of calls"
    head = b'{"index":%d,' % first.number
    if isinstance(first, CallBegin):
        head += b'"id":' + text(first.id) + b',"type":"function",'
    return head + b'"function":' + _function(run) + b"}"


def _function(run: list[Piece]) -> bytes:
    """A function's name where its call begins here, and what came of its arguments."""
    names = [piece.name for piece in run if isinstance(piece, CallBegin)]
    arguments = "".join(piece.text for piece in run if isinstance(piece, CallArguments))
    name = b'"name":' + text(names[0]) + b"," if names else b""
    return b"{" + name + b'"arguments":' + text(arguments) + b"}"
