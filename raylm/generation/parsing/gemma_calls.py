"""FunctionGemma's calls: `call:NAME{KEY:<escape>TEXT<escape>,KEY:42}`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from raylm.generation.parsing.formats import CallFormat
from raylm.generation.parsing.json_text import decoded, dumps
from raylm.generation.parsing.sink import Sink
from raylm.generation.parsing.tape import Marks, Tape, Waiting
from raylm.generation.parsing.values import Members, Schema

_ESCAPE = "<escape>"
_ESCAPES = Marks((_ESCAPE,))
_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r"[^:{}\[\],<\s]+")
_PLAIN = re.compile(r"[^{}\[\],<]+")
_TOKEN = re.compile(r"<escape>(?P<text>.*?)<escape>|(?P<mark>[{}\[\],:])|(?P<word>[^{}\[\],:<]+)", re.DOTALL)


class GemmaCalls:
    """Strings stand between two marks of escape, also within objects and arrays."""

    def __init__(self, form: CallFormat, tape: Tape, sink: Sink, tools: Mapping[str, Schema]) -> None:
        self._tape, self._sink, self._tools = tape, sink, tools
        self._ends = Marks(form.closes)

    def read(self, mark: str) -> Waiting[bool]:
        """Reads the call that `mark` has begun. False when what followed is no call."""
        tape = self._tape
        name: list[str] = []
        yield from tape.space()
        if not (yield from tape.literal("call:")):
            return False
        yield from tape.matching(_NAME, name.append)
        if not name or not (yield from tape.literal("{")):
            return False
        tape.forget()
        members = Members(self._sink, "".join(name), self._tools)
        while True:
            tape.record()
            yield from tape.space()
            if (yield from tape.literal("}")):
                break
            if not (yield from self._member(members)):
                return False
            tape.record()
            yield from tape.space()
            yield from tape.literal(",")
        members.close()
        tape.record()
        yield from tape.space()
        return bool((yield from tape.one_of(self._ends)))

    def _member(self, members: Members) -> Waiting[bool]:
        tape = self._tape
        keys: list[str] = []
        yield from tape.matching(_KEY, keys.append)
        if not keys or not (yield from tape.literal(":")):
            if (yield from tape.peek()):
                members.close()
            return False
        key = "".join(keys)
        bits: list[str] = []
        tape.forget()
        if (yield from tape.literal(_ESCAPE)):
            whole = bool((yield from tape.until(_ESCAPES, bits.append)))
            if whole:
                members.typed(key, "".join(bits), json_first=True)
        else:
            whole = yield from self._bare(bits)
            if whole:
                members.put(key, _json("".join(bits)))
        if not whole:
            members.broken_off(key, "".join(bits))
        return whole

    def _bare(self, bits: list[str]) -> Waiting[bool]:
        """The text of a value that is no string, up to the comma or brace after it. False when it ended before."""
        tape, depth = self._tape, 0
        while True:
            yield from tape.matching(_PLAIN, bits.append)
            character = yield from tape.peek()
            if not character:
                return False
            if depth <= 0 and character in ",}]":
                return True
            if (yield from tape.literal(_ESCAPE)):
                bits.append(_ESCAPE)
                if not (yield from tape.until(_ESCAPES, bits.append)):
                    return False
                bits.append(_ESCAPE)
                continue
            bits.append(tape.take(tape.at + 1))
            depth += (character in "{[") - (character in "}]")


def _json(text: str) -> str:
    """A value as JSON text; what it cannot be read as is a string."""
    tokens: list[str] = []
    read = 0
    for token in _TOKEN.finditer(text):
        read += len(token[0])
        if token["text"] is not None:
            tokens.append(dumps(token["text"]))
        elif token["mark"] == ":" and tokens and tokens[-1][0] != '"':
            tokens[-1] = dumps(tokens[-1]) + ":"
        elif word := token[0].strip():
            tokens.append(word)
    value = decoded("".join(tokens)) if read == len(text) else None
    try:
        return "null" if text.strip() == "null" else dumps(text.strip() if value is None else value)
    except ValueError:
        return dumps(text.strip())
