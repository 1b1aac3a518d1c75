"""Calls whose name stands before a JSON object: Mistral's, DeepSeek's, Kimi's."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from raylm.generation.parsing import json_text
from raylm.generation.parsing.formats import CallFormat
from raylm.generation.parsing.json_calls import ObjectCalls
from raylm.generation.parsing.sink import Sink
from raylm.generation.parsing.tape import Marks, Tape, Waiting

NAME = re.compile(r"[\w.\-/:]+")
_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCES = Marks(("```json", "```"))
_ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"


class MistralCalls:
    """`[TOOL_CALLS]NAME[ARGS]{...}`, `[TOOL_CALLS]NAME{...}`, `[TOOL_CALLS] [{"name": NAME, "arguments": {...}}]`."""

    def __init__(self, form: CallFormat, tape: Tape, sink: Sink) -> None:
        self._form, self._tape, self._sink = form, tape, sink
        self._ends = Marks(form.closes)

    def read(self, mark: str) -> Waiting[bool]:
        """Reads the calls that `mark` has begun. False when what followed is no call."""
        tape = self._tape
        yield from tape.space()
        while (yield from tape.literal(mark)):
            yield from tape.space()
        if (yield from tape.peek()) in ("[", "{") and not (yield from tape.stands(_ARGS)):
            return (yield from ObjectCalls(self._form, tape, self._sink, several=False).read(mark))
        name: list[str] = []
        yield from tape.matching(NAME, name.append)
        yield from tape.space()
        written_id: list[str] = []
        if (yield from tape.literal(_CALL_ID)):
            yield from tape.matching(NAME, written_id.append)
            yield from tape.space()
        yield from tape.literal(_ARGS)
        yield from tape.space()
        if not name or (yield from tape.peek()) != "{":
            return False
        self._sink.begin("".join(name), "".join(written_id))
        tape.forget()
        return (yield from json_text.container(tape, self._sink.arguments, self._ends))


class MarkedCalls(ABC):
    """Calls each between marks of its own, all within one more pair; a subclass reads what a call begins with."""

    def __init__(self, form: CallFormat, tape: Tape, sink: Sink) -> None:
        self._tape, self._sink = tape, sink
        self._begin = form.opens[-1]
        self._ends = Marks(form.closes)

    def read(self, mark: str) -> Waiting[bool]:
        """Reads the calls that `mark` has begun. False when what followed is no call."""
        tape = self._tape
        began = mark == self._begin
        while True:
            if not began:
                yield from tape.space()
                if not (yield from tape.literal(self._begin)):
                    return bool((yield from tape.one_of(self._ends)))
            if not (yield from self._header()):
                return False
            tape.forget()
            yield from json_text.arguments(tape, self._sink.arguments, self._ends)
            tape.record()
            yield from tape.space()
            ended = yield from tape.one_of(self._ends)
            while ended:
                tape.record()
                yield from tape.space()
                ended = yield from tape.one_of(self._ends)
            if not (yield from tape.stands(self._begin)):
                return False
            began = False

    @abstractmethod
    def _header(self) -> Waiting[bool]:
        """Reads up to the arguments and begins the call. False when what followed is no call."""


class DeepSeekCalls(MarkedCalls):
    """`function<sep>NAME`, then arguments in a fence of Markdown; or `NAME<sep>` and the arguments."""

    def _header(self) -> Waiting[bool]:
        tape = self._tape
        first: list[str] = []
        second: list[str] = []
        yield from tape.space()
        yield from tape.matching(NAME, first.append)
        yield from tape.space()
        if not first or not (yield from tape.literal(_SEPARATOR)):
            return False
        yield from tape.space()
        yield from tape.matching(NAME, second.append)
        yield from tape.space()
        yield from tape.one_of(_FENCES)
        yield from tape.space()
        if (yield from tape.peek()) != "{" or (second and "".join(first) != "function"):
            return False
        self._sink.begin("".join(second or first))
        return True


class KimiCalls(MarkedCalls):
    """`functions.NAME:INDEX<|tool_call_argument_begin|>{...}`; what stands before the arguments is the call's id."""

    def _header(self) -> Waiting[bool]:
        tape = self._tape
        written: list[str] = []
        yield from tape.space()
        yield from tape.matching(NAME, written.append)
        yield from tape.space()
        if not written or not (yield from tape.literal(_ARGUMENT_BEGIN)):
            return False
        yield from tape.space()
        if not (yield from tape.peek()):
            return False
        call_id = "".join(written)
        name, colon, _ = call_id.removeprefix("functions.").rpartition(":")
        self._sink.begin(name if colon else call_id.removeprefix("functions."), call_id if colon else "")
        return True
