"""Strings of a JSON Schema: length, pattern and format."""

from __future__ import annotations

from raylm.grammar.ebnf import EMPTY, Alt, Chars, Expr, Repeat, Rule, Rules, Seq, Text, repeat, seq
from raylm.grammar.fault import Fault
from raylm.grammar.formats import FORMATS, OF_ZOD, PIECES, SOURCES, UNCHECKED_FORMATS
from raylm.grammar.json_rules import FOLLOWS, MAX_MIN_CHARS, QUOTE_FOLLOWS, STRING, sized_string
from raylm.grammar.keywords import Schema, count
from raylm.grammar.linear import Linear, has_wide_loop
from raylm.grammar.regex import regex

_MIN_BUDGET = 8
"""Characters that each part of a format without a longest match has at least, where maxLength limits the whole."""


def string(rules: Rules, name: str, schema: Schema, place: str) -> Expr:
    """A JSON string that meets the schema. `name` begins the names of rules of its own."""
    low = count(schema, "minLength", place) or 0
    high = count(schema, "maxLength", place)
    if high is not None and low > high:
        raise Fault(f"minLength {low} is over maxLength {high}", place)
    pattern = schema.get("pattern")
    format_ = schema.get("format")
    if format_ in UNCHECKED_FORMATS:
        format_ = None
    if format_ is not None and format_ not in FORMATS:
        raise Fault(f"the format {format_!r:.100} is not supported; supported: {', '.join(sorted(FORMATS))}", place)
    if pattern is None and format_ is None:
        if low > MAX_MIN_CHARS:
            raise Fault(f"minLength {low} is over the limit of {MAX_MIN_CHARS}", place)
        return sized_string(rules, low, high) if low or high is not None else STRING
    try:
        if format_ is not None:
            return _formatted(rules, str(format_), pattern, low, high)
        return quoted_pattern(rules, name, _of_length(str(pattern), low, high))
    except Fault as fault:
        raise Fault(f"pattern {pattern!r:.100}: {fault}" if format_ is None else str(fault), place) from None


def _formatted(rules: Rules, format_: str, pattern: object, low: int, high: int | None) -> Expr:
    """A JSON string of a format, and of the pattern that zod writes beside it. Equal ones are one rule: that of a uri
    takes a second to compile."""
    source = FORMATS[format_] if pattern is None else OF_ZOD.get((format_, str(pattern)))
    if source is None:
        raise Fault(f"pattern together with format is not supported, but for the patterns of zod: {pattern!r:.100}")
    name = f"format-{SOURCES.index(source)}-{low}-{'' if high is None else high}"
    if name in rules:
        return Rule(name)
    if high is not None and source in PIECES:
        return rules.add(name, _limited_format(rules, name, format_, source, low, high), FOLLOWS)
    try:
        content = _of_length(source, low, high)
    except Fault as fault:
        raise Fault(f"the format {format_!r}: {fault}") from None
    return rules.add(name, quoted_pattern(rules, name, content, is_linear=source in PIECES), FOLLOWS)


def _limited_format(rules: Rules, name: str, format_: str, source: str, low: int, high: int) -> Expr:
    """A JSON string of a format that has no longest text: each part of it has a share of maxLength.

    A rule with max_chars ends where its characters are used up, or at the next place where it can.
    """
    pieces = [(piece, regex(piece.source, in_json=True)) for piece in PIECES[source]]
    lengths = [_lengths(expr) for _, expr in pieces]
    num_open = sum(most is None for _, most in lengths)
    left = high - sum(piece.slack for piece, _ in pieces) - sum(most or 0 for _, most in lengths)
    if left < num_open * _MIN_BUDGET:
        least_high = high - left + num_open * _MIN_BUDGET
        raise Fault(f"the format {format_!r} needs a maxLength of at least {least_high}, got {high}")
    least = sum(least for least, _ in lengths)
    if least < low:
        raise Fault(f"the format {format_!r} with a maxLength supports a minLength of up to {least}, got {low}")
    parts: list[Expr] = []
    for number, ((_, expr), (_, most)) in enumerate(zip(pieces, lengths, strict=True)):
        if most is None:
            part = f"{name}-p{number}"
            linear = Linear(rules, part, QUOTE_FOLLOWS if number == len(pieces) - 1 else '(="@")').write(expr, EMPTY)
            expr = rules.add(part, expr if linear is None else linear, attribute=f"[max_chars={left // num_open}]")
        parts.append(expr)
    return seq(Text('"'), *parts, Text('"'))


def quoted_pattern(rules: Rules, name: str, content: Expr, *, is_linear: bool = False) -> Expr:
    """A JSON string of this content; `is_linear`: as linear rules even where no loop of it is wide."""
    if is_linear or has_wide_loop(content):
        linear = Linear(rules, name, FOLLOWS).write(content, Text('"'))
        if linear is not None:
            return seq(Text('"'), linear)
    return seq(Text('"'), content, Text('"'))


def _of_length(source: str, low: int, high: int | None) -> Expr:
    content = regex(source, in_json=True)
    if low == 0 and high is None:
        return content
    least, most = _lengths(regex(source, in_json=False))
    if least >= low and (high is None or (most is not None and most <= high)):
        return content
    if (high is not None and least > high) or (most is not None and most < low):
        raise Fault(f"no match has a length from minLength {low} to maxLength {high}")
    counted = _counted_loop(content, regex(source, in_json=False), low, high)
    if counted is None:
        raise Fault("minLength and maxLength with a pattern are supported only where it repeats one character class")
    return counted


def _counted_loop(content: Expr, shape: Expr, low: int, high: int | None) -> Expr | None:
    """The content with as many turns of its one loop as give low..high characters; None where it is more than a loop
    over one character class and a fixed number of characters. `shape` is the content with one character for each."""
    parts, shapes = ((one.parts if isinstance(one, Seq) else (one,)) for one in (content, shape))
    lengths = [_lengths(one) for one in shapes]
    loops = [index for index, (least, most) in enumerate(lengths) if least != most]
    if len(parts) != len(shapes) or len(loops) != 1:
        return None
    (index,) = loops
    loop, inner = parts[index], shapes[index]
    if not isinstance(loop, Repeat) or not isinstance(inner, Repeat) or _lengths(inner.part) != (1, 1):
        return None
    others = sum(least for least, _ in lengths) - inner.low
    tops = [top for top in (loop.high, None if high is None else high - others) if top is not None]
    turns = repeat(loop.part, max(loop.low, low - others), min(tops) if tops else None)
    return seq(*parts[:index], turns, *parts[index + 1 :])


def _lengths(expr: Expr) -> tuple[int, int | None]:
    """Characters of the shortest and of the longest match; None: there is no longest."""
    if isinstance(expr, Text):
        return len(expr.value), len(expr.value)
    if isinstance(expr, Chars):
        return 1, 1
    if isinstance(expr, Seq | Alt):
        parts = [_lengths(part) for part in (expr.parts if isinstance(expr, Seq) else expr.options)]
        lows, highs = [part[0] for part in parts], [part[1] for part in parts]
        join = sum if isinstance(expr, Seq) else None
        known = [high for high in highs if high is not None]
        low = sum(lows) if join else min(lows, default=0)
        high = (sum(known) if join else max(known, default=0)) if len(known) == len(highs) else None
        return low, high
    if isinstance(expr, Repeat):
        low, most = _lengths(expr.part)
        return low * expr.low, None if most is None or expr.high is None else most * expr.high
    assert isinstance(expr, Rule)
    return 0, None
