"""JSON as it streams: values passed on as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from raylm.generation.parsing.tape import Marks, Tape, Waiting

# Outside of strings; < and ` can begin the mark that ends a call, which no JSON has there.
_PLAIN = re.compile(r'[^"{}\[\]<`]+')
_IN_STRING = re.compile(r'[^"\\]+')
_SPACE = re.compile(r"\s+")
_SCALAR = re.compile(r"[^\s,}\]{\[\"<`]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_OPENS, _CLOSES = frozenset("{["), frozenset("}]")


def string(tape: Tape, sink: Callable[[str], None]) -> Waiting[bool]:
    """Passes on a JSON string with its quotes; the opening one comes next. False when the text ended within."""
    sink(tape.take(tape.at + 1))
    while True:
        yield from tape.matching(_IN_STRING, sink)
        character = yield from tape.peek()
        if character == '"':
            sink(tape.take(tape.at + 1))
            return True
        if not character:
            return False
        sink(tape.take(tape.at + 1))
        if (yield from tape.peek()):
            sink(tape.take(tape.at + 1))


def whole_string(tape: Tape) -> Waiting[str | None]:
    """Reads a JSON string that comes next, decoded. None when it is none."""
    bits: list[str] = []
    if (yield from tape.peek()) != '"' or not (yield from string(tape, bits.append)):
        return None
    value = decoded("".join(bits))
    return value if isinstance(value, str) and not _SURROGATE.search(value) else None


def decoded(text: str) -> object:
    """What a JSON text says; None when it is none. Raw control characters in strings pass: models write them."""
    try:
        value: object = json.loads(text, strict=False, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None
    return value


def dumps(value: object) -> str:
    """JSON text that can be encoded. ValueError: a number is not finite."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _SURROGATE.search(text) else text


def _refused(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


def container(tape: Tape, sink: Callable[[str], None], ends: Marks, depth: int = 0) -> Waiting[bool]:
    """Passes on an object or array that comes next, up to the bracket that closes it; `depth` brackets are read.

    False when the text ended within, or one of `ends` stands outside of a string, which is left unread.
    """
    while True:
        yield from tape.matching(_PLAIN, sink)
        character = yield from tape.peek()
        if character == '"':
            yield from string(tape, sink)
        elif not character or (character in "<`" and (yield from _ends(tape, ends))):
            return False
        else:
            sink(tape.take(tape.at + 1))
            depth += (character in _OPENS) - (character in _CLOSES)
            if depth == 0:
                return True


def object_begins(tape: Tape, bits: list[str]) -> Waiting[bool]:
    """Reads the brace that comes next and the white space after it into `bits`. Whether it can begin an object."""
    bits.append(tape.take(tape.at + 1))
    yield from tape.matching(_SPACE, bits.append)
    return (yield from tape.peek()) in ('"', "}", "")


def value(tape: Tape, sink: Callable[[str], None], ends: Marks) -> Waiting[bool]:
    """Passes on any JSON value that comes next, as `container` does. False when there is none."""
    character = yield from tape.peek()
    if character in _OPENS:
        return (yield from container(tape, sink, ends))
    if character == '"':
        return (yield from string(tape, sink))
    return (yield from tape.matching(_SCALAR, sink))


def arguments(tape: Tape, sink: Callable[[str], None], ends: Marks) -> Waiting[bool]:
    """Passes on a call's arguments that come next. False when they broke off.

    An object streams as it is written; one that is written as a string is decoded; null is {}.
    """
    if (yield from tape.peek()) in _OPENS:
        return (yield from container(tape, sink, ends))
    bits: list[str] = []
    whole = yield from value(tape, bits.append, ends)
    text = "".join(bits)
    said = decoded(text)
    if isinstance(said, str) and isinstance(decoded(said), dict) and not _SURROGATE.search(said):
        sink(said)
    else:
        sink("{}" if text in ("", "null") else text)
    return whole or not text


def _ends(tape: Tape, ends: Marks) -> Waiting[bool]:
    for mark in ends.all:
        if (yield from tape.stands(mark)):
            return True
    return False
