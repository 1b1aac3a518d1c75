"""Expressions of a context-free grammar, and their text in the dialect that xgrammar reads (llama.cpp's GBNF).

An expression knows whether it can match anything at all (`is_never`), so that a schema that no text can meet is found
before a model is asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raylm.grammar.charset import CharSet
from raylm.grammar.fault import Fault

MAX_REPEAT = 1_000_000
FIRST_SPECIAL = 0x140000
"""What stands for a special token is the code point of this number and its id: beyond Unicode, so no set of characters
has it, and it begins with a byte that no UTF-8 has. xgrammar's own Token(id) will not do: its compiler's cache (0.2.8)
takes rules for equal that differ in ids alone."""


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly these characters; "" matches the empty text."""

    value: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    chars: CharSet


@dataclass(frozen=True, slots=True)
class Token:
    """The special token of this id, which has no text."""

    id: int


@dataclass(frozen=True, slots=True)
class Rule:
    """Whatever the rule of this name matches."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """One after another."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several; of none nothing matches."""

    options: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """From `low` to `high` times; high None is without end."""

    part: Expr
    low: int
    high: int | None


Expr = Text | Chars | Token | Rule | Seq | Alt | Repeat
NEVER = Alt(())
EMPTY = Text("")
SPACE = Rule("ws")
"""White space between the elements of JSON: of all rules the only one that matches the empty text."""


def seq(*parts: Expr) -> Expr:
    flat: list[Expr] = []
    for part in parts:
        for one in part.parts if isinstance(part, Seq) else (part,):
            if is_never(one):
                return NEVER
            if isinstance(one, Text) and flat and isinstance(last := flat[-1], Text):
                flat[-1] = Text(last.value + one.value)
            elif one != EMPTY:
                flat.append(one)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat)) if flat else EMPTY


def alt(options: Iterable[Expr]) -> Expr:
    """One of the options that can match; equal ones once."""
    flat: dict[Expr, None] = {}
    for option in options:
        for one in option.options if isinstance(option, Alt) else (option,):
            flat[one] = None
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def repeat(part: Expr, low: int, high: int | None) -> Expr:
    if is_never(part):
        return EMPTY if low == 0 else NEVER
    if high == 0:
        return EMPTY
    return part if (low, high) == (1, 1) else Repeat(part, low, high)


def maybe(part: Expr) -> Expr:
    return repeat(part, 0, 1)


def is_never(expr: Expr) -> bool:
    return isinstance(expr, Alt) and not expr.options


class Rules:
    """The rules of one grammar, by name."""

    def __init__(self) -> None:
        self._rules: dict[str, Expr] = {}
        self._lookaheads: dict[str, str] = {}
        self._attributes: dict[str, str] = {}
        self._written: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._places: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._rules or name in self._written

    def __len__(self) -> int:
        return len(self._rules)

    def define(self, name: str, text: str, *mentions: str, attribute: str = "") -> Rule:
        """A rule given as xgrammar's text, which mentions these rules; it must match some text of finite length.
        `attribute` is written behind its name."""
        self._written[name] = (f"{attribute} ::= {text}", mentions)
        return Rule(name)

    def add(self, name: str, expr: Expr, lookahead: str = "", place: str = "", *, attribute: str = "") -> Rule:
        """A rule; `lookahead` says, as xgrammar's text, what follows it wherever it stands. `place` is what it was made
        from: the place of a Fault in it. `attribute` is written behind its name."""
        self._rules[name] = expr
        self._attributes[name] = attribute
        if place:
            self._places[name] = place
        if lookahead:
            self._lookaheads[name] = lookahead
        return Rule(name)

    def text(self, root: Expr, place: str = "") -> str:
        """The grammar's text, with `root` as its first rule and without rules that nothing leads to.

        Raises Fault where no text of finite length matches, or a rule leads back to itself without a character between.
        """
        self.add("root", root, place=place)
        self._check_direct_cycles()
        finite = self._finite()
        if "root" not in finite:
            message = "no text can match: every way through it is contradictory or goes on without end"
            raise Fault(message, self._place_of_infinite(finite))
        lines, order, seen = [], ["root"], {"root"}
        for name in order:
            if name in self._written:
                text, mentioned = self._written[name]
            else:
                expr = _pruned(self._rules[name], finite)
                lookahead = self._lookaheads.get(name)
                text = f"({_written(expr, top=True)}) {lookahead}" if lookahead else _written(expr, top=True)
                text, mentioned = f"{self._attributes.get(name, '')} ::= {text}", tuple(_mentioned(expr))
            lines.append(f"{name}{text}\n")
            order += [other for other in dict.fromkeys(mentioned) if other not in seen]
            seen.update(mentioned)
        return "".join(lines)

    def _finite(self) -> set[str]:
        """The rules that match a text of finite length."""
        finite = set(self._written)
        left = self._rules
        while True:
            known = len(finite)
            # What a round finds helps the rules behind it: most rules come after those that they lead to.
            for name, expr in left.items():
                if _ends(expr, finite):
                    finite.add(name)
            if len(finite) == known:
                return finite
            left = {name: expr for name, expr in left.items() if name not in finite}

    def _place_of_infinite(self, finite: set[str]) -> str:
        """The place of the innermost rule that no text of finite length matches."""
        name: str | None = "root"
        place, seen = "", {"root"}
        while name is not None:
            place = self._places.get(name, place)
            inner = (one for one in _mentioned(self._rules[name]) if one not in finite and one not in seen)
            name = next(inner, None)
            seen |= {name} if name is not None else set()
        return place

    def _check_direct_cycles(self) -> None:
        """Raises Fault for a rule that begins with itself: no character would ever be the first."""
        done: set[str] = set()
        for start in self._rules:
            path: dict[str, None] = {}
            stack = [(start, False)]
            while stack:
                name, is_left = stack.pop()
                if is_left:
                    del path[name]
                    done.add(name)
                elif name in path:
                    place = next((self._places[one] for one in (name, *path) if one in self._places), "")
                    raise Fault("a schema leads back to itself without a character between", place)
                elif name not in done and name in self._rules:
                    path[name] = None
                    stack.append((name, True))
                    stack += [(other, False) for other in _begins_with(self._rules[name])]


def _pruned(expr: Expr, finite: set[str]) -> Expr:
    """The expression without options that match nothing."""
    if isinstance(expr, Rule):
        return expr if expr.name in finite else NEVER
    if isinstance(expr, Seq):
        return seq(*(_pruned(part, finite) for part in expr.parts))
    if isinstance(expr, Alt):
        return alt(option for option in (_pruned(one, finite) for one in expr.options) if not is_never(option))
    if isinstance(expr, Repeat):
        return repeat(_pruned(expr.part, finite), expr.low, expr.high)
    return expr


def _ends(expr: Expr, finite: set[str]) -> bool:
    if isinstance(expr, Rule):
        return expr.name in finite
    if isinstance(expr, Seq):
        return all(_ends(part, finite) for part in expr.parts)
    if isinstance(expr, Alt):
        return any(_ends(option, finite) for option in expr.options)
    if isinstance(expr, Repeat):
        return expr.low == 0 or _ends(expr.part, finite)
    return bool(expr.chars) if isinstance(expr, Chars) else True


def _mentioned(expr: Expr) -> Iterable[str]:
    if isinstance(expr, Rule):
        yield expr.name
    for part in parts_of(expr):
        yield from _mentioned(part)


def parts_of(expr: Expr) -> Sequence[Expr]:
    """The expressions that it is made of."""
    if isinstance(expr, Seq):
        return expr.parts
    if isinstance(expr, Alt):
        return expr.options
    return (expr.part,) if isinstance(expr, Repeat) else ()


def _begins_with(expr: Expr) -> Iterable[str]:
    """Rules that may match at its very beginning."""
    if isinstance(expr, Rule):
        yield expr.name
    elif isinstance(expr, Seq):
        for part in expr.parts:
            yield from _begins_with(part)
            if not may_be_empty(part):
                return
    else:
        for part in parts_of(expr):
            yield from _begins_with(part)


def may_be_empty(expr: Expr) -> bool:
    """Whether the empty text matches; of all rules only SPACE does."""
    if isinstance(expr, Rule):
        return expr.name == SPACE.name
    if isinstance(expr, Seq):
        return all(may_be_empty(part) for part in expr.parts)
    if isinstance(expr, Alt):
        return any(may_be_empty(option) for option in expr.options)
    if isinstance(expr, Repeat):
        return expr.low == 0 or may_be_empty(expr.part)
    return expr == EMPTY


def _written(expr: Expr, *, top: bool = False) -> str:
    if isinstance(expr, Text):
        return '"' + "".join(_in_string(char) for char in expr.value) + '"'
    if isinstance(expr, Chars):
        return "[" + "".join(_range(low, high) for low, high in expr.chars.ranges) + "]"
    if isinstance(expr, Rule):
        return expr.name
    if isinstance(expr, Token):
        return f'"{_escaped(FIRST_SPECIAL + expr.id)}"'
    if isinstance(expr, Seq):
        text = " ".join(_written(part) for part in expr.parts)
        return text if top else f"({text})"
    if isinstance(expr, Alt):
        text = " | ".join(_written(option) for option in expr.options)
        return text if top else f"({text})"
    part = _written(expr.part)
    if isinstance(expr.part, Repeat):
        part = f"({part})"
    return part + _times(expr.low, expr.high)


def _times(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _in_string(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if " " <= char <= "~" else _escaped(ord(char))


def _range(low: int, high: int) -> str:
    return _in_class(low) if low == high else f"{_in_class(low)}-{_in_class(high)}"


def _in_class(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else _escaped(code)


def _escaped(code: int) -> str:
    # Not \x: xgrammar reads all hexadecimal digits after it, however many.
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
