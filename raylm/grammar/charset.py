"""Sets of characters as sorted ranges of code points. Half surrogates belong to none: they are no text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

LAST = 0x10FFFF
_UNICODE_TABLED = 0x20000
"""Characters from here on are taken for word characters, spaces and digits where that keeps less."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CharSet:
    """Characters. `ranges` are sorted, apart from each other, and both ends belong to them."""

    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> CharSet:
        """The characters of ranges in any order, which may overlap."""
        joined: list[Range] = []
        for low, high in sorted(ranges):
            if joined and low <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(joined[-1][1], high))
            else:
                joined.append((low, high))
        return cls(tuple(joined))

    @classmethod
    def text(cls, chars: str) -> CharSet:
        return cls.of((ord(char), ord(char)) for char in chars)

    def __or__(self, other: CharSet) -> CharSet:
        return CharSet.of([*self.ranges, *other.ranges])

    def __and__(self, other: CharSet) -> CharSet:
        return (self.inverse() | other.inverse()).inverse()

    def __sub__(self, other: CharSet) -> CharSet:
        return self & other.inverse()

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, char: str) -> bool:
        return any(low <= ord(char) <= high for low, high in self.ranges)

    def inverse(self) -> CharSet:
        """Every code point that is not in it; half surrogates too."""
        gaps, begin = [], 0
        for low, high in self.ranges:
            if begin < low:
                gaps.append((begin, low - 1))
            begin = high + 1
        if begin <= LAST:
            gaps.append((begin, LAST))
        return CharSet(tuple(gaps))

    def chars(self) -> Iterable[str]:
        for low, high in self.ranges:
            yield from map(chr, range(low, high + 1))


SURROGATES = CharSet(((0xD800, 0xDFFF),))
ANY = SURROGATES.inverse()
CONTROL = CharSet(((0, 0x1F),))
ESCAPED_IN_JSON = CONTROL | CharSet.text('"\\')
LINE_ENDS = CharSet.text("\n\r\u2028\u2029")


@dataclass(frozen=True, slots=True)
class CharClass:
    r"""A class such as \d, of which dialects of regular expressions think differently: the characters that all of them
    put into it (ECMAScript's, ASCII only), and those that any does (Python's, all of Unicode)."""

    surely: CharSet
    perhaps: CharSet

    def inverse(self) -> CharClass:
        return CharClass(self.perhaps.inverse() - SURROGATES, self.surely.inverse() - SURROGATES)

    def __or__(self, other: CharClass) -> CharClass:
        return CharClass(self.surely | other.surely, self.perhaps | other.perhaps)


def exactly(chars: CharSet) -> CharClass:
    return CharClass(chars, chars)


DIGITS = CharSet.of([(0x30, 0x39)])
_WORD = DIGITS | CharSet.of([(0x41, 0x5A), (0x61, 0x7A), (0x5F, 0x5F)])
_SPACE = CharSet.text(" \t\n\r\f\v")


@cache
def named_class(name: str) -> CharClass:
    """The class "digit", "word" or "space"."""
    tests = {"digit": str.isdecimal, "word": str.isalnum, "space": str.isspace}
    surely = {"digit": DIGITS, "word": _WORD, "space": _SPACE}[name]
    test = tests[name]
    found = [(code, code) for code in range(_UNICODE_TABLED) if test(chr(code))]
    return CharClass(surely, CharSet.of([*found, *surely.ranges, (_UNICODE_TABLED, LAST), (0xFEFF, 0xFEFF)]))
