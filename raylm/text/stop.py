"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopStrings:
    """Watches one answer for its stop strings, which may lie across any borders of the pieces.

    The stop string that is complete first ends the text; of several complete at the same character, the longest. So the
    result does not depend on how the text is cut. Text that may be the beginning of a stop string is held back, so at
    most the longest stop string less one character. Each character costs constant time for each stop string (Knuth,
    Morris, Pratt 1977), whatever the length of the text and of the stop strings.
    """

    __slots__ = ("_first_chars", "_held", "_matchers")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` holds at least one string, none of them empty."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._first_chars = re.compile("[" + "".join(re.escape(stop[0]) for stop in stops) + "]")
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns the text that is decided, and whether a stop string ended it.

        After a stop string nothing more may be pushed.
        """
        position = 0
        if not self._held:  # no match has begun: go on where one may
            begin = self._first_chars.search(text)
            if begin is None:
                return text, False
            position = begin.start()
        matchers = self._matchers
        for index in range(position, len(text)):
            char = text[index]
            found = 0
            for matcher in matchers:
                if matcher.step(char) and matcher.length > found:
                    found = matcher.length
            if found:
                return (self._held + text[: index + 1])[:-found], True
        return self._hold(self._held + text), False

    def finish(self) -> str:
        """The text held back: at the end it is no stop string any more."""
        held, self._held = self._held, ""
        return held

    def _hold(self, text: str) -> str:
        num_held = max(matcher.matched for matcher in self._matchers)
        border = len(text) - num_held
        self._held = text[border:]
        return text[:border]


class _Matcher:
    """One stop string: `matched` is the length of its longest beginning that the text so far ends with."""

    __slots__ = ("_fallback", "_stop", "length", "matched")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.matched = 0
        # fallback[n]: the longest beginning, shorter than n, that the first n characters end with
        self._fallback = fallback = [0, 0]
        matched = 0
        for index in range(1, len(stop)):
            while matched and stop[index] != stop[matched]:
                matched = fallback[matched]
            matched += stop[index] == stop[matched]
            fallback.append(matched)

    def step(self, char: str) -> bool:
        """Take one character; True when it completes the stop string."""
        matched, stop = self.matched, self._stop
        while matched and stop[matched] != char:
            matched = self._fallback[matched]
        matched += stop[matched] == char
        self.matched = matched
        return matched == self.length
