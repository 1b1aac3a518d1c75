r"""Regular expressions as expressions of a grammar.

The whole text must match, as if the regex stood between ^ and $. Where dialects differ (\d, \w, \s, the dot) the
narrower reading holds: what is generated matches in ECMAScript's and in Python's. A construct that no finite automaton
can keep to, or none here does, is refused with its name and position: nothing is ignored.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Sequence
from typing import Any

from raylm.grammar import charset
from raylm.grammar.charset import ANY, CharClass, CharSet, exactly, named_class
from raylm.grammar.ebnf import EMPTY, MAX_REPEAT, Chars, Expr, Text, alt, repeat, seq
from raylm.grammar.fault import Fault

_MAX_DEPTH = 50
_CLASSES = {"CATEGORY_DIGIT": "digit", "CATEGORY_WORD": "word", "CATEGORY_SPACE": "space"}
_REFUSED = {
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a conditional group",
    "ASSERT": "lookahead or lookbehind",
    "ASSERT_NOT": "lookahead or lookbehind",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}
_SHORT_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_NAMED_GROUP = re.compile(r"\(\?<(?=[A-Za-z_])")


def regex(pattern: str, *, in_json: bool) -> Expr:
    """The texts that a regex matches as a whole; with in_json, as they stand inside of a JSON string's quotes.

    Raises Fault.
    """
    # ECMAScript's (?<name>...) is Python's (?P<name>...).
    source = _NAMED_GROUP.sub("(?P<", pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(source)
    except re.error as error:
        raise Fault(error.msg, "" if error.pos is None else f"position {error.pos}") from None
    except (OverflowError, RecursionError) as error:
        raise Fault(f"the regex cannot be read: {error}") from None
    if parsed.state.flags & ~re.UNICODE:
        raise Fault("flags such as (?i) are not supported")
    return _Reader(in_json).read(parsed, True, True, 0)


def json_char(char: str) -> str:
    """A character as it is written inside of a JSON string."""
    if char in charset.ESCAPED_IN_JSON:
        return "\\" + _SHORT_ESCAPES.get(char, f"u{ord(char):04x}")
    return char


class _Reader:
    """Reads the tree that Python's own parser of regular expressions makes."""

    def __init__(self, in_json: bool) -> None:
        self._in_json = in_json

    def read(self, tree: Sequence[Any], at_start: bool, at_end: bool, depth: int) -> Expr:
        """`at_start` and `at_end`: nothing of the regex stands before it, after it."""
        if depth > _MAX_DEPTH:
            raise Fault(f"the regex nests deeper than {_MAX_DEPTH} levels")
        parts = []
        for index, (kind, value) in enumerate(tree):
            first = at_start and all(str(kind) == "AT" for kind, _ in tree[:index])
            last = at_end and all(str(kind) == "AT" for kind, _ in tree[index + 1 :])
            parts.append(self._one(str(kind), value, first, last, depth))
        return seq(*parts)

    def _one(self, kind: str, value: Any, first: bool, last: bool, depth: int) -> Expr:
        if kind == "LITERAL":
            return self._class(exactly(CharSet(((value, value),))))
        if kind == "NOT_LITERAL":
            return self._class(exactly(CharSet(((value, value),))).inverse())
        if kind == "ANY":
            return self._class(exactly(ANY - charset.LINE_ENDS))
        if kind == "IN":
            return self._class(_members(value))
        if kind == "BRANCH":
            return alt(self.read(branch, first, last, depth + 1) for branch in value[1])
        if kind == "SUBPATTERN":
            _, flags_on, flags_off, inner = value
            if flags_on or flags_off:
                raise Fault("flags such as (?i:...) are not supported")
            return self.read(inner, first, last, depth + 1)
        if kind in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(value, depth)
        if kind == "AT":
            return self._anchor(str(value), first, last)
        raise Fault(f"{_REFUSED.get(kind, kind)} is not supported")

    def _repeat(self, value: Any, depth: int) -> Expr:
        low, high, inner = value
        for count in (low, high):
            if count is not sre.MAXREPEAT and count > MAX_REPEAT:
                raise Fault(f"a repetition of {count} is over the limit of {MAX_REPEAT}")
        part = self.read(inner, False, False, depth + 1)
        return repeat(part, int(low), None if high is sre.MAXREPEAT else int(high))

    def _anchor(self, name: str, first: bool, last: bool) -> Expr:
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            if not first:
                raise Fault("^ is supported only at the beginning of the regex")
        elif name in ("AT_END", "AT_END_STRING"):
            if not last:
                raise Fault("$ is supported only at the end of the regex")
        else:
            raise Fault(r"the word boundary \b is not supported")
        return EMPTY

    def _class(self, members: CharClass) -> Expr:
        chars = members.surely & ANY
        if not chars:
            raise Fault("a class of the regex holds no character")
        if not self._in_json:
            return _chars(chars)
        plain, escaped = chars - charset.ESCAPED_IN_JSON, chars & charset.ESCAPED_IN_JSON
        options: list[Expr] = [_chars(plain)] if plain else []
        return alt([*options, *(Text(json_char(char)) for char in escaped.chars())])


def _chars(chars: CharSet) -> Expr:
    (low, high), *others = chars.ranges
    return Text(chr(low)) if low == high and not others else Chars(chars)


def _members(items: Sequence[Any]) -> CharClass:
    """The members of [...]"""
    found = exactly(CharSet(()))
    negated = False
    for kind, value in items:
        name = str(kind)
        if name == "NEGATE":
            negated = True
        elif name == "LITERAL":
            found |= exactly(CharSet(((value, value),)))
        elif name == "RANGE":
            found |= exactly(CharSet((value,)))
        elif name == "CATEGORY":
            found |= _category(str(value))
        else:
            raise Fault(f"{name} inside of [...] is not supported")
    return found.inverse() if negated else found


def _category(name: str) -> CharClass:
    positive = name.replace("_NOT_", "_")
    known = named_class(_CLASSES[positive])
    return known if positive == name else known.inverse()
