"""JSON numbers between bounds, as expressions of a grammar.

Numbers are written as decimals of limited length, so that none overflows and no model writes digits without end: up to
_DIGITS before the point and _FRACTION after it; only numbers without bounds may have an exponent.

A range is read digit by digit from the left: as long as a number agrees with a bound, its next digit is limited by the
bound's; from the first digit that differs on all digits are free. So a bound costs one choice a digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal

from raylm.grammar.charset import DIGITS, CharSet
from raylm.grammar.ebnf import EMPTY, NEVER, Chars, Expr, Text, alt, is_never, maybe, repeat, seq

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
    low, high = _lowest_integer(bounds), _highest_integer(bounds)
    if low is None and high is None:
        return seq(maybe(Text("-")), _whole(0, None))
    options: list[Expr] = []
    if (low is None or low <= 0) and (high is None or high >= 0):
        options.append(Text("0"))
    above = _whole(max(1, low or 1), high)
    below = _whole(max(1, -(high or -1)), None if low is None else -low)
    return alt([*options, *_signed(above, below)])


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
        return seq(maybe(Text("-")), _whole(0, None), fraction, exponent)
    places = max(_places(bounds.low), _places(bounds.high)) + _FINER
    low, high = bounds.low, bounds.high
    if low is not None and bounds.low_open:
        low = _next(low, places, 1)
    if high is not None and bounds.high_open:
        high = _next(high, places, -1)
    zero = Decimal(0)
    above = _magnitude(zero if low is None else max(low, zero), high)
    if low is not None and low >= 0:
        return above
    below = _magnitude(zero if high is None else max(-high, zero), None if low is None else -low)
    return alt(_signed(above, below))


def _places(bound: Decimal | None) -> int:
    """Digits after the point."""
    if bound is None:
        return 0
    exponent = bound.normalize(_EXACT).as_tuple().exponent
    return max(0, -int(exponent))


def _next(bound: Decimal, places: int, sign: int) -> Decimal:
    """The nearest number behind an exclusive bound that is another one as a float of 64 bits too."""
    if not bound:
        places = max(places, _FRACTION)
    while float(found := _EXACT.add(bound, Decimal((0 if sign > 0 else 1, (1,), -places)))) == float(bound):
        places -= 1
    return found


def _signed(above: Expr, below: Expr) -> list[Expr]:
    """Numbers over 0, and those under it, which are given without their sign."""
    if above == below:
        return [] if is_never(above) else [seq(maybe(Text("-")), above)]
    return [option for option in (above, seq(Text("-"), below)) if not is_never(option)]


def _magnitude(low: Decimal, high: Decimal | None) -> Expr:
    """Decimals of low..high, low at least 0; high None is without a bound."""
    if high is not None and high < low:
        return NEVER
    whole, part = _split(low)
    options: list[Expr] = []
    top = None
    if high is not None:
        top, top_part = _split(high)
        if top == whole:
            return seq(Text(str(whole)), _fraction(part, top_part))
        options.append(seq(Text(str(top)), _fraction("", top_part)))
        top -= 1
    if part:
        options.append(seq(Text(str(whole)), _fraction(part, None)))
        whole += 1
    options.append(seq(_whole(whole, top), _fraction("", None)))
    return alt(option for option in options if not is_never(option))


def _split(value: Decimal) -> tuple[int, str]:
    """Its whole part, and the digits behind the point without zeros at their end."""
    whole, _, part = f"{value:f}".partition(".")
    return int(whole), part.rstrip("0")


def _fraction(low: str, high: str | None) -> Expr:
    """A point and digits between these ones, high None without a bound; nothing at all where that is in the range."""
    digits = seq(Text("."), _tail(low, high, 1))
    return digits if low else maybe(digits)


def _tail(low: str, high: str | None, least: int) -> Expr:
    """At least `least` digits behind the point that are low..high; digits that are left out are zeros."""
    low = low.rstrip("0")
    if high is None and not low:
        return repeat(_DIGIT, least, _FRACTION)
    if high is not None and not high.strip("0"):
        return NEVER if low else repeat(Text("0"), least, _FRACTION)
    zeros = len(low) - len(low.lstrip("0"))
    if high is None and zeros > 1:
        sooner = seq(repeat(Text("0"), 0, zeros - 1), _range("1", "9"), repeat(_DIGIT, 0, _FRACTION))
        return alt([sooner, seq(Text("0" * zeros), _tail(low[zeros:], None, 0))])
    options: list[Expr] = [] if low or least else [EMPTY]
    first, last = low[:1] or "0", high[0] if high else "9"
    if first == last:
        options.append(seq(Text(first), _tail(low[1:], high[1:] if high else None, 0)))
        return alt(option for option in options if not is_never(option))
    if low:
        options.append(seq(Text(first), _tail(low[1:], None, 0)))
        first = chr(ord(first) + 1)
    if high:
        options.append(seq(Text(last), _tail("", high[1:], 0)))
        last = chr(ord(last) - 1)
    options.append(seq(_range(first, last), repeat(_DIGIT, 0, _FRACTION)))
    return alt(option for option in options if not is_never(option))


def _whole(low: int, high: int | None) -> Expr:
    """Integers of low..high, low at least 0; high None is as many digits as numbers have."""
    if high is None:
        high = 10 ** max(_DIGITS, len(str(low)) + 1) - 1
    options: list[Expr] = []
    if low == 0 <= high:
        options.append(Text("0"))
        low = 1
    if low > high:
        return alt(options)
    # Numbers of as many digits as a bound that limits them, and between them those of any digits.
    least, most = len(str(low)), len(str(high))
    if low > 10 ** (least - 1):
        top = min(high, 10**least - 1)
        options.append(_digits(str(low), str(top)))
        least += 1
    if least <= most and high < 10**most - 1:
        options.append(_digits(str(10 ** (most - 1)), str(high)))
        most -= 1
    if least <= most:
        options.append(seq(_range("1", "9"), repeat(_DIGIT, least - 1, most - 1)))
    return alt(option for option in options if not is_never(option))


def _digits(low: str, high: str) -> Expr:
    """Digits from low to high, which have the same length."""
    rest = len(low) - 1
    zeros, nines = "0" * rest, "9" * rest
    if low[1:] == zeros and high[1:] == nines:
        return seq(_range(low[0], high[0]), repeat(_DIGIT, rest, rest))
    if low[0] == high[0]:
        return seq(Text(low[0]), _digits(low[1:], high[1:]))
    options: list[Expr] = []
    first, last = low[0], high[0]
    if low[1:] != zeros:
        options.append(seq(Text(first), _digits(low[1:], nines)))
        first = chr(ord(first) + 1)
    if high[1:] != nines:
        options.append(seq(Text(last), _digits(zeros, high[1:])))
        last = chr(ord(last) - 1)
    if first <= last:
        options.append(seq(_range(first, last), repeat(_DIGIT, rest, rest)))
    return alt(options)


def _range(first: str, last: str) -> Expr:
    """One digit; none of an empty range."""
    if first >= last:
        return Text(first) if first == last else NEVER
    return Chars(CharSet(((ord(first), ord(last)),)))
