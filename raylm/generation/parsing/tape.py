"""The text between a stream and its readers.

A reader is a generator: it yields when it needs text that has not come yet, and goes on when there is more or the text
has ended. So a reader is written as if the whole text were there, and where the stream was cut cannot matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
Waiting = Generator[None, None, _T]
"""What a reader returns once it has got enough text."""
_SPACE = re.compile(r"\s+")


class Marks:
    """Some literal texts, found as early in a text as possible, the longer before the shorter."""

    __slots__ = ("_first", "_longest", "_regex", "all")

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.all = tuple(sorted(marks, key=len, reverse=True))
        self._regex = re.compile("|".join(map(re.escape, self.all)) or r"(?!)")
        self._first = re.compile("[" + re.escape("".join({mark[0] for mark in marks})) + "]" if marks else r"(?!)")
        self._longest = len(self.all[0]) if marks else 0

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        found = self._regex.search(text, start)
        return found.span() if found else None

    def held(self, text: str, start: int) -> int:
        """From where on the text's end could be the beginning of a mark; the text's length when it cannot."""
        at = max(start, len(text) - self._longest + 1)
        while found := self._first.search(text, at):
            tail = text[found.start() :]
            if any(len(mark) > len(tail) and mark.startswith(tail) for mark in self.all):
                return found.start()
            at = found.start() + 1
        return len(text)


class Tape:
    """The text that has come and was not read, and a record of what was read since `record`."""

    __slots__ = ("_recorded", "_recording", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._recording = False
        self._recorded: list[str] = []

    def feed(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def record(self, read: str = "") -> None:
        """From here on, what is read is kept until it turns out to be well-formed; `read` is what was read already."""
        self._recording = True
        self._recorded = [read] if read else []

    def forget(self) -> None:
        """What was read is well-formed."""
        self._recording = False
        self._recorded.clear()

    def recorded(self) -> str:
        text = "".join(self._recorded)
        self.forget()
        return text

    def unread(self, mark: str) -> None:
        """`mark`, which was read last, comes next again."""
        self.at -= len(mark)

    def take(self, end: int) -> str:
        """The text up to position `end`, which is read by this."""
        taken = self.text[self.at : end]
        self.at = end
        if self._recording:
            self._recorded.append(taken)
        return taken

    def peek(self) -> Waiting[str]:
        """The next character, not read; empty at the text's end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Waiting[None]:
        """Reads white space."""
        yield from self.matching(_SPACE)

    def matching(self, pattern: re.Pattern[str], sink: Callable[[str], None] | None = None) -> Waiting[bool]:
        """Reads as much as matches a pattern of one or more characters of a class. Whether anything did."""
        any_read = False
        while True:
            if self.at < len(self.text):
                found = pattern.match(self.text, self.at)
                if found is None:
                    return any_read
                taken = self.take(found.end())
                any_read = True
                if sink is not None:
                    sink(taken)
                if self.at < len(self.text):
                    return True
            if self.ended:
                return any_read
            yield

    def stands(self, mark: str) -> Waiting[bool]:
        """Whether this mark comes next; it is not read."""
        while len(self.text) - self.at < len(mark):
            if self.ended or not mark.startswith(self.text[self.at :]):
                return False
            yield
        return self.text.startswith(mark, self.at)

    def literal(self, mark: str) -> Waiting[bool]:
        """Reads this mark if it comes next."""
        if (yield from self.stands(mark)):
            self.take(self.at + len(mark))
            return True
        return False

    def one_of(self, marks: Marks) -> Waiting[str | None]:
        """Reads the longest of these marks that comes next."""
        for mark in marks.all:
            if (yield from self.literal(mark)):
                return mark
        return None

    def until(self, marks: Marks, sink: Callable[[str], None]) -> Waiting[str | None]:
        """Reads up to and with the first mark, what is before it goes to `sink` as it comes. None at the text's end."""
        while True:
            found = marks.find(self.text, self.at)
            held = len(self.text) if self.ended else marks.held(self.text, self.at)
            # What is held may become a longer mark than the one that is there.
            whole = found is not None and found[0] < held
            end = found[0] if found is not None and whole else held
            if end > self.at:
                sink(self.take(end))
            if found is not None and whole:
                return self.take(found[1])
            if self.ended:
                return None
            yield
