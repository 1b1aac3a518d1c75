"""One streaming reader for all formats: what a model writes becomes pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raylm.generation.parsing.families import ModelFormat
from raylm.generation.parsing.formats import CallFormat, ReasoningFormat
from raylm.generation.parsing.json_calls import ObjectCalls
from raylm.generation.parsing.sink import Sink
from raylm.generation.parsing.tape import Marks, Tape, Waiting
from raylm.generation.pieces import Piece

Schema = Mapping[str, object]


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
        self._sink = Sink(calls.ids if calls else "call", trims=calls is not None)
        self._calls = calls
        self._run = self._read(in_reasoning)
        self._over = False
        self._in_reasoning = in_reasoning and form.reasoning is not None

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._in_reasoning

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
        begins = reasoning.begin if reasoning else ()
        opens = () if calls is None else (*calls.opens, *((calls.bare,) if calls.bare else ()))
        noise = (*(calls.noise if calls else ()), *(reasoning.noise if reasoning else ()))
        marks = Marks((*begins, *opens, *noise))
        mark: str | None = ""
        if in_reasoning and reasoning:
            mark = yield from self._reason(reasoning)
        while mark is not None:
            if mark in begins and reasoning and self._sink.fresh:
                mark = yield from self._reason(reasoning)
                continue
            if mark in opens and calls:
                yield from self._call(calls, mark)
            elif mark not in noise:
                self._sink.text(mark)
            mark = yield from self._tape.until(marks, self._sink.text)

    def _reason(self, form: ReasoningFormat) -> Waiting[str | None]:
        """Reasoning up to its end. Gives the mark of a call that ended it, or nothing; None at the text's end."""
        self._in_reasoning = True
        opens = self._calls.opens if self._calls and form.ended_by_calls else ()
        mark = yield from self._tape.until(Marks((*form.end, *opens)), self._sink.reasoning)
        self._in_reasoning = mark is None
        return "" if mark in form.end else mark

    def _call(self, form: CallFormat, mark: str) -> Waiting[None]:
        """What `mark` begins: calls, or text when it is malformed."""
        tape = self._tape
        if mark == form.bare:
            tape.unread(mark)
            if not form.bare_anywhere and not self._sink.fresh:
                self._sink.text(tape.take(tape.at + len(mark)))
                return
        tape.record("" if mark == form.bare else mark)
        reader = ObjectCalls(form, tape, self._sink)
        before = self._sink.calls
        if not (yield from reader.read("" if mark == form.bare else mark)):
            left = tape.recorded()
            if not left and self._sink.calls == before:
                left = tape.take(tape.at + 1)
            self._sink.text(left)
        tape.forget()
