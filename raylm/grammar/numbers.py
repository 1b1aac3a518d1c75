"""JSON numbers between bounds, as expressions of a grammar.

Numbers are written as decimals of limited length, so that none overflows and no model writes digits without end: up to
_DIGITS before the point and _FRACTION after it; only numbers without bounds may have an exponent.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal

from raylm.grammar.charset import DIGITS, CharSet
from raylm.grammar.ebnf import Chars, Expr, Text, alt, is_never, maybe, repeat, seq

_DIGITS = 18
_FRACTION = 16
_FINER = 4
"""An exclusive bound is kept from by a step so many digits finer than the bounds themselves."""
_EXACT = Context(prec=200)
_DIGIT = Chars(DIGITS)


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range of numbers; None is without a bound on that side."""

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False


def integer(bounds: Bounds) -> Expr:
    """Integers in the range."""
    low = _lowest_integer(bounds)
    high = _highest_integer(bounds)
    if low is None and high is None:
        return seq(maybe(Text("-")), _plain_integer())
    most = 10 ** max(_DIGITS, *(len(str(abs(bound))) + 1 for bound in (low, high) if bound is not None)) - 1
    return _signed(-most if low is None else low, most if high is None else high, 0)


def _plain_integer() -> Expr:
    return alt([Text("0"), seq(Chars(CharSet.text("123456789")), repeat(_DIGIT, 0, _DIGITS - 1))])


def _lowest_integer(bounds: Bounds) -> int | None:
    if bounds.low is None:
        return None
    whole = int(bounds.low.to_integral_value("ROUND_CEILING"))
    return whole + 1 if bounds.low_open and whole == bounds.low else whole


def _highest_integer(bounds: Bounds) -> int | None:
    if bounds.high is None:
        return None
    whole = int(bounds.high.to_integral_value("ROUND_FLOOR"))
    return whole - 1 if bounds.high_open and whole == bounds.high else whole


def number(bounds: Bounds) -> Expr:
    """Numbers in the range."""
    if bounds.low is None and bounds.high is None:
        fraction = maybe(seq(Text("."), repeat(_DIGIT, 1, _FRACTION)))
        sign = maybe(Chars(CharSet.text("+-")))
        exponent = maybe(seq(Chars(CharSet.text("eE")), sign, repeat(_DIGIT, 1, 2)))
        return seq(maybe(Text("-")), _plain_integer(), fraction, exponent)
    places = max(_places(bounds.low), _places(bounds.high))
    if bounds.low_open or bounds.high_open:
        places += _FINER
    low, high = (None if bound is None else int(_EXACT.scaleb(bound, places)) for bound in (bounds.low, bounds.high))
    most = 10 ** max(_DIGITS + places, *(len(str(abs(b))) + 1 for b in (low, high) if b is not None)) - 1
    low = -most if low is None else low + bounds.low_open
    high = most if high is None else high - bounds.high_open
    options = [
        _signed(_scaled_up(low, places, have), _scaled_down(high, places, have), have) for have in range(places + 1)
    ]
    options.append(_longer(low, high, places))
    return alt(option for option in options if not is_never(option))


def _places(bound: Decimal | None) -> int:
    """Digits after the point."""
    if bound is None:
        return 0
    exponent = bound.normalize(_EXACT).as_tuple().exponent
    return max(0, -int(exponent))


def _scaled_up(value: int, places: int, have: int) -> int:
    """`value` of `places` digits after the point with only `have` of them, rounded up."""
    divisor: int = 10 ** (places - have)
    return -(-value // divisor)


def _scaled_down(value: int, places: int, have: int) -> int:
    divisor: int = 10 ** (places - have)
    return value // divisor


def _longer(low: int, high: int, places: int) -> Expr:
    """Numbers with more digits after the point than the bounds: cut to `places` they are nearer to 0 than they are."""
    more = repeat(_DIGIT, 1, max(1, _FRACTION - places))
    point = Text("") if places else Text(".")
    options = []
    if high > 0:
        options.append(seq(_between(max(low, 0), high - 1, places), point, more))
    if low < 0:
        options.append(seq(Text("-"), _between(max(-high, 0), -low - 1, places), point, more))
    return alt(option for option in options if not is_never(option))


def _signed(low: int, high: int, places: int) -> Expr:
    """Integers in the range, written with a point before the last `places` digits."""
    options = []
    if high >= 0:
        options.append(_between(max(low, 0), high, places))
    if low < 0:
        options.append(seq(Text("-"), _between(max(1, -high), -low, places)))
    return alt(option for option in options if not is_never(option))


def _between(low: int, high: int, places: int) -> Expr:
    """Digits of low..high, both at least 0, with at least one digit before the point."""
    options = []
    length = max(len(str(low)), places + 1)
    while low <= high:
        last = min(high, 10**length - 1)
        options += [_digits(pattern, places) for pattern in _patterns(str(low).zfill(length), str(last).zfill(length))]
        low, length = last + 1, length + 1
    return alt(options)


_Cell = tuple[str, str]


def _patterns(low: str, high: str) -> list[list[_Cell]]:
    """Ranges of digits, one a place, that together are the numbers from low to high, which have the same length."""
    if not low:
        return [[]]
    if set(low) == {"0"} and set(high) == {"9"}:
        return [[("0", "9")] * len(low)]
    if low[0] == high[0]:
        return [[(low[0], low[0]), *rest] for rest in _patterns(low[1:], high[1:])]
    nines, zeros = "9" * (len(low) - 1), "0" * (len(low) - 1)
    found = [[(low[0], low[0]), *rest] for rest in _patterns(low[1:], nines)]
    first, last = chr(ord(low[0]) + 1), chr(ord(high[0]) - 1)
    if first <= last:
        found.append([(first, last), *[("0", "9")] * len(nines)])
    return found + [[(high[0], high[0]), *rest] for rest in _patterns(zeros, high[1:])]


def _digits(cells: list[_Cell], places: int) -> Expr:
    parts: list[Expr] = []
    whole = len(cells) - places
    for begin, end in ((0, whole), (whole, len(cells))):
        if begin and places:
            parts.append(Text("."))
        index = begin
        while index < end:
            count = 1
            while index + count < end and cells[index + count] == cells[index]:
                count += 1
            low, high = cells[index]
            if low == high:
                parts.append(Text(low * count))
            else:
                parts.append(repeat(Chars(CharSet(((ord(low), ord(high)),))), count, count))
            index += count
    return seq(*parts)
