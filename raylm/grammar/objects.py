"""JSON objects of a JSON Schema: properties in the schema's order, then additional ones."""

from __future__ import annotations

from typing import NamedTuple

from raylm.grammar.charset import ANY, ESCAPED_IN_JSON, CharSet
from raylm.grammar.ebnf import EMPTY, NEVER, SPACE, Chars, Expr, Rule, Rules, Text, alt, is_never, maybe, repeat, seq
from raylm.grammar.json_rules import STRING, STRING_END
from raylm.grammar.regex import json_char

MAX_EXCLUDED_CHARS = 20_000
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class Property(NamedTuple):
    """A property by its name; `value` is what its value may be."""

    name: str
    value: Expr
    required: bool


class Extra(NamedTuple):
    """Properties that the schema does not name: their quoted keys and their values."""

    key: Expr
    value: Expr


class ObjectRules:
    """The rules of one object: one for each property and number of properties before it, as far as that matters."""

    def __init__(self, rules: Rules, name: str, properties: list[Property], extra: Extra | None) -> None:
        self._rules = rules
        self._name = name
        self._properties = properties
        self._extra = None if extra is None or is_never(extra.value) or is_never(extra.key) else extra

    def build(self, low: int, high: int | None) -> Expr:
        """An object of low..high properties."""
        most = len(self._properties)
        cap = max(1, low, 0 if high is None else min(high, most) + 1)
        for index in range(most, -1, -1):
            for before in range(min(index, cap) + 1):
                self._rules.add(self._state_name(index, before), self._state(index, before, cap, low, high))
        return seq(Text("{"), Rule(self._state_name(0, 0)))

    def _state_name(self, index: int, before: int) -> str:
        return f"{self._name}-{index}-{before}"

    def _state(self, index: int, before: int, cap: int, low: int, high: int | None) -> Expr:
        if index == len(self._properties):
            return self._end(before, low, high)
        name, value, required = self._properties[index]
        options: list[Expr] = []
        if high is None or before < high:
            member = seq(Text(quoted(name) + ":"), maybe(Text(" ")), value)
            rest = Rule(self._state_name(index + 1, min(before + 1, cap)))
            options.append(seq(self._separator(before), member, rest))
        if not required:
            options.append(Rule(self._state_name(index + 1, before)))
        return alt(option for option in options if not is_never(option))

    def _separator(self, before: int) -> Expr:
        return seq(Text(",") if before else EMPTY, SPACE)

    def _end(self, before: int, low: int, high: int | None) -> Expr:
        close = seq(SPACE, Text("}"))
        if high is not None and before > high:
            return NEVER
        if self._extra is None:
            return close if before >= low else NEVER
        member = seq(self._extra.key, Text(":"), maybe(Text(" ")), self._extra.value)
        # As many as there are: `low` of them at least is asked for only where the keys need not differ.
        least = max(0, low - before)
        room = None if high is None else high - before
        more = seq(Text(","), SPACE, member)
        if before:
            return seq(repeat(more, least, room), close) if room is None or room >= least else NEVER
        first = seq(SPACE, member, repeat(more, max(0, least - 1), None if room is None else room - 1))
        if room == 0:
            return close if not least else NEVER
        return seq(first if least else maybe(first), close)


def quoted(text: str) -> str:
    return '"' + "".join(map(json_char, text)) + '"'


def other_keys(rules: Rules, name: str, taken: list[str]) -> Expr:
    """Quoted keys that are none of `taken`, however they are written."""
    if not taken:
        return STRING
    names = set(taken)
    prefixes = {name[:length] for name in names for length in range(len(name) + 1)}
    numbers = {prefix: number for number, prefix in enumerate(sorted(prefixes))}
    follow: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for prefix in prefixes - {""}:
        follow[prefix[:-1]].append(prefix[-1])
    for prefix, number in numbers.items():
        children = sorted(follow[prefix])
        options: list[Expr] = [] if prefix in names else [Text('"')]
        plain = ANY - ESCAPED_IN_JSON - CharSet.text("".join(children))
        escapes = [letter for letter, meant in _ESCAPES.items() if meant not in children]
        other = alt([Chars(plain), *(Text("\\" + letter) for letter in escapes)])
        options.append(seq(other, STRING_END))
        options += [seq(Text(json_char(child)), Rule(f"{name}-k{numbers[prefix + child]}")) for child in children]
        rules.add(f"{name}-k{number}", alt(options))
    return seq(Text('"'), Rule(f"{name}-k{numbers['']}"))
