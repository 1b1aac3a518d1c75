"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class _Pattern(NamedTuple):
    """One stop string; fallback[n] is the longest beginning, shorter than n, that its first n characters end with."""

    stop: str
    fallback: list[int]


class StopTable:
    """Stop strings made ready for searching: built once a request, shared by its answers, never changed."""

    __slots__ = ("first_chars", "patterns")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` holds at least one string, none of them empty."""
        self.patterns = [_Pattern(stop, _fallback(stop)) for stop in dict.fromkeys(stops)]
        self.first_chars = re.compile("[" + "".join(re.escape(stop[0]) for stop in stops) + "]")


def _fallback(stop: str) -> list[int]:
    fallback = [0, 0]
    matched = 0
    for index in range(1, len(stop)):
        while matched and stop[index] != stop[matched]:
            matched = fallback[matched]
        matched += stop[index] == stop[matched]
        fallback.append(matched)
    return fallback


class StopStrings:
    """Watches one answer for its stop strings, which may lie across any borders of the pieces.

    The stop string that is complete first ends the text; of several complete at the same character, the longest. So the
    result does not depend on how the text is cut. Text that may be the beginning of a stop string is held back, so at
    most the longest stop string less one character. Each character costs constant time for each stop string (Knuth,
    Morris, Pratt 1977), whatever the length of the text and of the stop strings.
    """

    __slots__ = ("_held", "_matched", "_table", "found", "is_armed")

    def __init__(self, table: StopTable) -> None:
        self._table = table
        self._matched = [0] * len(table.patterns)
        """For each stop string, the length of its longest beginning that the text so far ends with."""
        self._held = ""
        self.is_armed = True
        """Off: a stop string that is complete does not end the text, which goes on as if it were none."""
        self.found = ""
        """The stop string that ended the text."""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns the text that is decided, and whether a stop string ended it.

        After a stop string nothing more may be pushed.
        """
        position = 0
        if not self._held:  # no match has begun: go on where one may
            begin = self._table.first_chars.search(text)
            if begin is None:
                return text, False
            position = begin.start()
        for index in range(position, len(text)):
            self.found = self._step(text[index])
            if self.found:
                return (self._held + text[: index + 1])[: -len(self.found)], True
        return self._hold(self._held + text), False

    def finish(self) -> str:
        """The text held back: at the end it is no stop string any more."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str:
        """Take one character; the longest stop string that it completes, else ""."""
        found = ""
        for number, (stop, fallback) in enumerate(self._table.patterns):
            matched = self._matched[number]
            while matched and stop[matched] != char:
                matched = fallback[matched]
            matched += stop[matched] == char
            if matched == len(stop):
                if self.is_armed and matched > len(found):
                    found = stop
                # Not armed: what follows may complete another stop string that begins inside this one.
                matched = fallback[matched]
            self._matched[number] = matched
        return found

    def _hold(self, text: str) -> str:
        border = len(text) - max(self._matched)
        self._held = text[border:]
        return text[:border]
