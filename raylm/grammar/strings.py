"""Strings of a JSON Schema: length, pattern and format."""

from __future__ import annotations

from raylm.grammar.ebnf import Alt, Chars, Expr, Repeat, Rule, Rules, Seq, Text, repeat, seq
from raylm.grammar.fault import Fault
from raylm.grammar.json_rules import FOLLOWS, MAX_MIN_CHARS, STRING, sized_string
from raylm.grammar.keywords import Schema, count
from raylm.grammar.linear import Linear, has_wide_loop
from raylm.grammar.regex import regex

_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LONG, _SHORT = r"(?:0[13578]|1[02])", r"(?:0[469]|11)"
_DAYS = rf"{_LONG}-(?:0[1-9]|[12][0-9]|3[01])|{_SHORT}-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
_LEAP = r"[12][0-9](?:0[48]|[2468][048]|[13579][26])-02-29"
_DATE = rf"(?:[12][0-9]{{3}}-(?:{_DAYS})|{_LEAP})"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# Loops without counts: a count costs milliseconds in each step. So a label may be longer than the 63 characters of DNS.
_HOST = r"[A-Za-z0-9]+(?:[.-][A-Za-z0-9]+)*"
_WORD = r"[A-Za-z0-9_+-]+"
_CLOCK = r"[0-9]{1,4}H(?:[0-9]{1,4}M)?(?:[0-9]{1,4}S)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S"
_SPAN = r"[0-9]{1,4}Y(?:[0-9]{1,4}M)?(?:[0-9]{1,4}D)?|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,4}D"
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@-]"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,4}})?)?(?:/{_PATH}*)*"
    rf"(?:\?(?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?"
)
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": rf"P(?:(?:{_SPAN})(?:T(?:{_CLOCK}))?|T(?:{_CLOCK})|[0-9]{{1,4}}W)",
    "email": rf"{_WORD}(?:\.{_WORD})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": r"[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{1,4}){7}",
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": _URI,
}
"""What is generated for a format: valid by it, though not everything that is."""
UNCHECKED_FORMATS = frozenset({"password"})
"""They say how a value is shown, not which are valid."""


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
    if pattern is not None and format_ is not None:
        raise Fault("pattern together with format is not supported", place)
    if pattern is None and format_ is None:
        if low > MAX_MIN_CHARS:
            raise Fault(f"minLength {low} is over the limit of {MAX_MIN_CHARS}", place)
        return sized_string(rules, low, high) if low or high is not None else STRING
    source = str(pattern if pattern is not None else FORMATS[str(format_)])
    try:
        return quoted_pattern(rules, name, _of_length(source, low, high))
    except Fault as fault:
        raise Fault(f"pattern {source!r:.100}: {fault}" if pattern is not None else str(fault), place) from None


def quoted_pattern(rules: Rules, name: str, content: Expr) -> Expr:
    """A JSON string of this content."""
    if has_wide_loop(content):
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
    if isinstance(content, Repeat) and _lengths(regex(source, in_json=False).part) == (1, 1):  # type: ignore[union-attr]
        tops = [top for top in (content.high, high) if top is not None]
        return repeat(content.part, max(content.low, low), min(tops) if tops else None)
    raise Fault("minLength and maxLength with a pattern are supported only where it repeats one character class")


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
