"""One streaming reader for all formats: what a model writes becomes pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from raylm.generation.parsing.channels import Channels
from raylm.generation.parsing.families import ModelFormat
from raylm.generation.parsing.formats import CallFormat, ReasoningFormat
from raylm.generation.parsing.gemma_calls import GemmaCalls
from raylm.generation.parsing.json_calls import ObjectCalls
from raylm.generation.parsing.named_calls import DeepSeekCalls, KimiCalls, MistralCalls
from raylm.generation.parsing.python_calls import PythonCalls
from raylm.generation.parsing.sink import Sink
from raylm.generation.parsing.tagged_calls import TaggedCalls
from raylm.generation.parsing.tape import Marks, Tape, Waiting
from raylm.generation.parsing.values import Schema
from raylm.generation.pieces import Piece


class CallReader(Protocol):
    def read(self, mark: str) -> Waiting[bool]:
        """Reads the calls that `mark` has begun. False when what followed is no call: what is on record is text."""
        ...


@dataclass(frozen=True)
class OutputReading:
    """How the choices of one request are read; the fields are OutputReader's."""

    form: ModelFormat
    tools: Mapping[str, Schema]
    reads_calls: bool
    in_reasoning: bool

    def begin(self) -> OutputReader:
        return OutputReader(self.form, tools=self.tools, reads_calls=self.reads_calls, in_reasoning=self.in_reasoning)


class OutputReader:
    """Reads one output of a model.

    A stream gives the same pieces, joined, wherever it was cut. What is no well-formed call is text; nothing raises and
    nothing but marks and white space between calls is lost.
    """

    def __init__(
        self,
        form: ModelFormat,
        *,
        tools: Mapping[str, Schema] | None = None,
        reads_calls: bool = True,
        in_reasoning: bool = False,
    ) -> None:
        """`tools` are the schemas of the parameters by the tools' names: formats that do not write JSON read values by
        them. With `in_reasoning` the prompt has ended in the mark that begins reasoning.
        """
        calls = form.calls if reads_calls else None
        self._reasoning_format = form.reasoning
        self._tape = Tape()
        strips = calls is not None and calls.strips_text
        self._sink = Sink(calls.ids if calls else "call", trims=calls is not None, strips=strips)
        self._calls = calls
        self._tools = tools or {}
        self._in_reasoning = in_reasoning and form.reasoning is not None
        self._channels: Channels | None = None
        if any(part is not None and part.name == "harmony" for part in form):
            self._channels = Channels(
                self._tape,
                self._sink,
                reads_calls=calls is not None,
                reads_reasoning=form.reasoning is not None,
                in_reasoning=self._in_reasoning,
            )
        self._run = self._channels.read() if self._channels else self._read(self._in_reasoning)
        self._over = False

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._in_reasoning if self._channels is None else self._channels.in_reasoning

    def push(self, text: str) -> list[Piece]:
        """What is known once this text has come too."""
        self._tape.feed(text)
        return self._go_on()

    def finish(self) -> list[Piece]:
        """What was held back. Nothing may be pushed after it."""
        self._tape.ended = True
        pieces = self._go_on()
        self._sink.end()
        return pieces + self._sink.drain()

    def _go_on(self) -> list[Piece]:
        if not self._over:
            self._over = next(self._run, True) is True
        return self._sink.drain()

    def _read(self, in_reasoning: bool) -> Waiting[None]:
        """The whole output."""
        calls, reasoning = self._calls, self._reasoning_format
        begins, ends = (reasoning.begin, reasoning.end) if reasoning else ((), ())
        opens = () if calls is None else (*calls.opens, *((calls.bare,) if calls.bare else ()))
        noise = (*(calls.noise if calls else ()), *(reasoning.noise if reasoning else ()))
        marks = Marks((*begins, *ends, *opens, *noise))
        reader = _call_reader(calls, self._tape, self._sink, self._tools) if calls else None
        mark: str | None = ""
        if in_reasoning and reasoning is not None:
            yield from self._written_again(reasoning)
            mark = yield from self._reason(reasoning)
        while mark is not None:
            if mark in begins and reasoning and self._sink.fresh:
                mark = yield from self._reason(reasoning)
                continue
            if mark in opens and calls and reader:
                yield from self._call(calls, reader, mark)
            elif mark not in noise and not (mark in ends and self._sink.fresh):
                self._sink.text(mark)
            mark = yield from self._tape.until(marks, self._sink.text)

    def _written_again(self, form: ReasoningFormat) -> Waiting[None]:
        """The mark that begins reasoning: a model may write it although the prompt has ended in it."""
        self._tape.record()
        yield from self._tape.space()
        space = self._tape.recorded()
        if not (yield from self._tape.one_of(Marks(form.begin))) and space:
            self._sink.reasoning(space)

    def _reason(self, form: ReasoningFormat) -> Waiting[str | None]:
        """Reasoning up to its end. Gives the mark of a call that ended it, or nothing; None at the text's end."""
        self._in_reasoning = True
        opens = self._calls.opens if self._calls and form.ended_by_calls else ()
        mark = yield from self._tape.until(Marks((*form.end, *opens)), self._sink.reasoning)
        self._in_reasoning = mark is None
        return "" if mark in form.end else mark

    def _call(self, form: CallFormat, reader: CallReader, mark: str) -> Waiting[None]:
        """What `mark` begins: calls, or text when it is malformed."""
        tape = self._tape
        if mark == form.bare:
            tape.unread(mark)
            if not form.bare_anywhere and not self._sink.fresh:
                self._sink.text(tape.take(tape.at + len(mark)))
                return
        mark = "" if mark == form.bare else mark
        tape.record(mark)
        if not (yield from reader.read(mark)):
            text = tape.recorded()
            self._sink.text(text.removeprefix(mark).lstrip() if mark and form.hides_marks else text)
        tape.forget()


def _call_reader(form: CallFormat, tape: Tape, sink: Sink, tools: Mapping[str, Schema]) -> CallReader:
    match form.style:
        case "mistral":
            return MistralCalls(form, tape, sink)
        case "deepseek":
            return DeepSeekCalls(form, tape, sink)
        case "kimi":
            return KimiCalls(form, tape, sink)
        case "pythonic":
            return PythonCalls(form, tape, sink, tools)
        case "gemma":
            return GemmaCalls(form, tape, sink, tools)
        case "tagged" if form.tags:
            return TaggedCalls(form, form.tags, tape, sink, tools)
    return ObjectCalls(form, tape, sink)
