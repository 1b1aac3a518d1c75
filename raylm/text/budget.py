"""What one run of a chat template may cost: seconds, and characters of the values that it makes."""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from typing import NamedTuple

from jinja2.utils import Namespace

_ITEM = 16
"""What an item of a list counts beside its own size, in characters."""
_VALUES = 16
"""All values of a run together may take so many times what one of them may."""
_SPARE = 2**24
_CLOCK_EVERY = 64
_SEQUENCES = (list, tuple, KeysView, ValuesView, ItemsView)


class Limits(NamedTuple):
    """`chars`: characters of the prompt, and of any other value that the template makes."""

    seconds: float
    chars: int


class TooMuch(Exception):
    """A template went over a limit; the message says over which."""


class Budget:
    """The limits of one run. Everything that a template does passes here: a loop's turn, a call, an operator, a text.

    Python's threads cannot be stopped from outside, so a run stops itself, at the next thing that it does.
    """

    def __init__(self, limits: Limits, inputs: Iterable[object] = ()) -> None:
        """`inputs`: the values that the template gets; made of JSON's types, and not changed during the run."""
        self._limits = limits
        self._deadline = time.monotonic() + limits.seconds
        self._room = limits.chars * _VALUES + _SPARE
        self._until_clock = _CLOCK_EVERY
        self._inputs = inputs
        self._known: dict[int, int] | None = None

    def spend(self, size: int = 0) -> None:
        """Count one operation that makes a value of this size. Raises TooMuch."""
        if size > self._limits.chars:
            raise TooMuch(f"makes a value of {size} characters or more, at most {self._limits.chars} are allowed")
        self._room -= size + _ITEM
        if self._room < 0:
            raise TooMuch(f"makes too many values: more than {self._limits.chars * _VALUES + _SPARE} characters in all")
        self._until_clock -= 1 + (size >> 12)
        if self._until_clock < 0:
            self._until_clock = _CLOCK_EVERY
            if time.monotonic() > self._deadline:
                raise TooMuch(f"takes more than {self._limits.seconds:g} s")

    def spend_on(self, value: object) -> None:
        """Count a value with all that it holds, as often as it holds it: lists may share their items, so that a few of
        them are a text without end. Raises TooMuch."""
        self.spend(len(value) if isinstance(value, str) else self.size(value))

    def size(self, value: object) -> int:
        """Characters of a value, about; no more than what tells that it is too large."""
        if isinstance(value, str):
            return len(value)
        if self._known is None:
            self._known = {}
            for given in self._inputs:
                _learn(given, self._known)
        known, most = self._known, self._limits.chars
        total = 0
        left = [value]
        while left and total <= most:
            item = left.pop()
            if isinstance(item, str):
                total += len(item)
            elif (size := known.get(id(item))) is not None:
                total += size
            elif isinstance(item, _SEQUENCES):
                total += _ITEM * (len(item) + 1)
                left.extend(item)
            elif isinstance(item, Mapping):
                total += _ITEM * (2 * len(item) + 1)
                left.extend(item.keys())
                left.extend(item.values())
            elif isinstance(item, Namespace):
                total += _ITEM
                left.append(attributes_of(item))
            elif isinstance(item, int):
                total += _ITEM + item.bit_length() // 3
            else:
                total += _ITEM
        return total


class Counted:
    """An iterable each of whose items is counted."""

    __slots__ = ("_budget", "_items")

    def __init__(self, budget: Budget, items: Iterable[object]) -> None:
        self._budget = budget
        self._items = items

    def __iter__(self) -> Iterator[object]:
        spend = self._budget.spend
        for item in self._items:
            spend()
            yield item

    def __bool__(self) -> bool:
        return bool(self._items)

    def __len__(self) -> int:
        if not isinstance(self._items, Sized):
            raise TypeError("it has no length")
        return len(self._items)


def attributes_of(namespace: Namespace) -> dict[str, object]:
    """What a template has set on a namespace."""
    found: dict[str, object] = object.__getattribute__(namespace, "_Namespace__attrs")
    return found


def _learn(value: object, known: dict[int, int]) -> int:
    """The size of a value of JSON's types, noting those of all containers in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        size = _ITEM * (2 * len(value) + 1)
        size += sum(len(key) for key in value) + sum(_learn(item, known) for item in value.values())
    elif isinstance(value, list):
        size = _ITEM * (len(value) + 1) + sum(_learn(item, known) for item in value)
    else:
        return _ITEM
    known[id(value)] = size
    return size
