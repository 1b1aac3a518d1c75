"""Calls written as Python's: `[f(a=1), g(b='x')]`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from raylm.generation.parsing.formats import CallFormat
from raylm.generation.parsing.sink import Sink
from raylm.generation.parsing.tape import Marks, Tape, Waiting
from raylm.generation.parsing.values import Members, Schema, python_json

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"\w+")
_PLAIN = re.compile(r"""[^'"()\[\]{},]+""")
_IN_QUOTES = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}


class PythonCalls:
    """A list of calls with keyword arguments; after a mark, brackets around it may be missing."""

    def __init__(self, form: CallFormat, tape: Tape, sink: Sink, tools: Mapping[str, Schema]) -> None:
        self._tape, self._sink, self._tools = tape, sink, tools
        self._ends = Marks(form.closes)

    def read(self, mark: str) -> Waiting[bool]:
        """Reads the calls that `mark` has begun; empty where a bracket did. False when what followed is no call."""
        tape = self._tape
        yield from tape.space()
        bracket = yield from tape.literal("[")
        while True:
            yield from tape.space()
            if not (yield from self._call()):
                return False
            tape.record()
            yield from tape.space()
            if (yield from tape.literal(",")):
                continue
            if bracket and (yield from tape.literal("]")):
                tape.record()
                yield from tape.space()
                bracket = False
            return bool((yield from tape.one_of(self._ends)))

    def _call(self) -> Waiting[bool]:
        tape = self._tape
        name: list[str] = []
        yield from tape.matching(_NAME, name.append)
        if not name or not (yield from tape.literal("(")):
            return False
        members: Members | None = None
        while True:
            yield from tape.space()
            if (yield from tape.literal(")")):
                tape.forget()
                (members or Members(self._sink, "".join(name), self._tools)).close()
                return True
            keys: list[str] = []
            yield from tape.matching(_KEY, keys.append)
            yield from tape.space()
            if not keys or not (yield from tape.literal("=")):
                if members and (yield from tape.peek()):
                    members.close()
                return False
            if members is None:
                tape.forget()
                members = Members(self._sink, "".join(name), self._tools)
                tape.record("".join(keys) + "=")
            yield from tape.space()
            if not (yield from self._member(members, "".join(keys))):
                return False
            tape.record()
            yield from tape.literal(",")

    def _member(self, members: Members, key: str) -> Waiting[bool]:
        bits: list[str] = []
        whole = yield from self._value(bits)
        text = "".join(bits).strip()
        if not whole:
            self._tape.forget()
            members.broken_off(key, text)
            return False
        value = python_json(text)
        if value is not None:
            members.literal(key, value)
        elif text and members.declares(key):
            # Templates print strings without quotes, too.
            members.typed(key, text, json_first=False)
        else:
            members.close()
            return False
        return True

    def _value(self, bits: list[str]) -> Waiting[bool]:
        """A value's text, up to the comma or bracket after it. False when the text ended before it."""
        tape, depth = self._tape, 0
        while True:
            yield from tape.matching(_PLAIN, bits.append)
            character = yield from tape.peek()
            if not character:
                return False
            if depth == 0 and character in ",)]}":
                return True
            bits.append(tape.take(tape.at + 1))
            if character in _IN_QUOTES:
                yield from self._quoted(character, bits)
            else:
                depth += (character in "([{") - (character in ")]}")

    def _quoted(self, quote: str, bits: list[str]) -> Waiting[None]:
        """The rest of a string, with the quote that ends it."""
        tape = self._tape
        while True:
            yield from tape.matching(_IN_QUOTES[quote], bits.append)
            character = yield from tape.peek()
            if not character:
                return
            bits.append(tape.take(tape.at + 1))
            if character == quote:
                return
            if (yield from tape.peek()):
                bits.append(tape.take(tape.at + 1))
