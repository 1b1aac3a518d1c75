"""Calls with JSON arguments: objects with the name in them, and a name before the object."""

from __future__ import annotations

import re

from raylm.generation.parsing import json_text
from raylm.generation.parsing.formats import CallFormat
from raylm.generation.parsing.sink import Sink
from raylm.generation.parsing.tape import Marks, Tape, Waiting

_BETWEEN = re.compile(r"[\s,;]+")
_KNOWN = frozenset({"id", "type", "index"})


class ObjectCalls:
    """`{"name": NAME, "arguments": {...}}`, one, several, or an array of them."""

    def __init__(self, form: CallFormat, tape: Tape, sink: Sink, *, several: bool = True) -> None:
        """Without `several`, more than one call need brackets around them."""
        self._form, self._tape, self._sink = form, tape, sink
        self._several = several
        self._ends = Marks(form.closes)

    def read(self, mark: str) -> Waiting[bool]:
        """Reads the calls that `mark` has begun; empty where a bracket did. False when what followed is no call."""
        tape = self._tape
        yield from tape.space()
        array = yield from tape.literal("[")
        while True:
            yield from tape.space()
            if not (yield from self._object(strict=not mark)):
                return False
            tape.record()
            between = yield from tape.matching(_BETWEEN)
            if array and (yield from tape.literal("]")):
                array = False
                tape.record()
                between = yield from tape.matching(_BETWEEN)
            if (yield from tape.one_of(self._ends)):
                return True
            if (yield from tape.peek()) != "{" or not (array or (self._several and (between or mark))):
                return False

    def _object(self, strict: bool) -> Waiting[bool]:
        """One call. Without a mark before it (`strict`) it has no keys but a call's, and arguments."""
        tape = self._tape
        if not (yield from tape.literal("{")):
            return False
        call = _Call(self._sink, tape)
        while True:
            yield from tape.matching(_BETWEEN)
            if (yield from tape.literal("}")):
                return call.end(strict)
            key = yield from json_text.whole_string(tape)
            if key is None:
                return False
            yield from tape.space()
            if not (yield from tape.literal(":")):
                return False
            yield from tape.space()
            if not (yield from self._member(call, key, strict)):
                return False

    def _member(self, call: _Call, key: str, strict: bool) -> Waiting[bool]:
        tape = self._tape
        if key == self._form.name_key and call.name is None:
            call.name = yield from json_text.whole_string(tape)
            return bool(call.name)
        if key in self._form.argument_keys and not call.argued:
            bits: list[str] = []
            braced = (yield from tape.peek()) == "{"
            if braced and not (yield from json_text.object_begins(tape, bits)):
                return False
            call.argue()
            call.arguments("".join(bits))
            if braced:
                whole = yield from json_text.container(tape, call.arguments, self._ends, depth=1)
            else:
                whole = yield from json_text.arguments(tape, call.arguments, self._ends)
            if call.began:
                tape.record()
                if not whole and (yield from tape.one_of(self._ends)):
                    tape.record()
            return whole
        if key == self._form.name_key or key in self._form.argument_keys or (strict and key not in _KNOWN):
            return False
        return (yield from json_text.value(tape, _drop, self._ends))


class _Call:
    """A call whose name may come after its arguments, which then wait for it."""

    __slots__ = ("_held", "_sink", "_tape", "argued", "began", "name")

    def __init__(self, sink: Sink, tape: Tape) -> None:
        self._sink, self._tape = sink, tape
        self.name: str | None = None
        self.argued = self.began = False
        self._held: list[str] = []

    def argue(self) -> None:
        self.argued = True
        if self.name is not None:
            self._begin(self.name)

    def arguments(self, text: str) -> None:
        if self.began:
            self._sink.arguments(text)
        else:
            self._held.append(text)

    def end(self, strict: bool) -> bool:
        """Whether it was a call."""
        if not self.name or (strict and not self.argued):
            return False
        if not self.began:
            self._begin(self.name)
            self._sink.arguments("".join(self._held) or "{}")
        return True

    def _begin(self, name: str) -> None:
        self.began = True
        self._tape.forget()
        self._sink.begin(name)


def _drop(text: str) -> None:
    """A member that says nothing of the call."""
