"""Checks of a request's fields: each returns the value in the very type that travels, or raises RequestRejected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected

MAX_TOKEN_ID = 2**31 - 1
_LISTS = (list, tuple, set, frozenset)


class Bounds(NamedTuple):
    """The range of a number, both ends included unless low_open."""

    low: float
    high: float
    low_open: bool = False


def integer(name: str, value: object, low: int, high: int) -> int:
    """An int from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestRejected(f"{name} must be an integer from {low} to {high}, got {value!r:.300}", param=name)
    return int(value)


def number(name: str, value: object, bounds: Bounds) -> float:
    """An int or a float within the bounds, as a float."""
    low, high, low_open = bounds
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not low <= value <= high
        or (low_open and value == low)
    ):
        bracket = "(" if low_open else "["
        raise RequestRejected(f"{name} must be a number in {bracket}{low:g}, {high:g}], got {value!r:.300}", param=name)
    return float(value)


def structure(name: str, value: object) -> StructuredOutput:
    """A StructuredOutput, which has checked itself."""
    if not isinstance(value, StructuredOutput):
        raise RequestRejected(f"{name} must be a StructuredOutput, got {value!r:.300}", param=name)
    return value


def flag(name: str, value: object) -> bool:
    """A bool and nothing that is merely true or false."""
    if type(value) is not bool:
        raise RequestRejected(f"{name} must be true or false, got {value!r:.300}", param=name)
    return value


def strings(name: str, value: object, *, most: int, max_chars: int | None = None) -> tuple[str, ...]:
    """Up to `most` non-empty strings, each of up to `max_chars` characters; one string stands for a list of it."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, _LISTS):
        raise RequestRejected(f"{name} must be a string or a list of strings, got {value!r:.300}", param=name)
    if len(value) > most:
        raise RequestRejected(f"{name} has {len(value)} strings, at most {most} are allowed", param=name)
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestRejected(f"{name} must hold non-empty strings, got {text!r:.300}", param=name)
        if max_chars is not None and len(text) > max_chars:
            raise RequestRejected(
                f"{name} holds a string of {len(text)} characters, at most {max_chars} are allowed", param=name
            )
    return tuple(map(str, value))


def tokens(name: str, value: object, *, most: int) -> tuple[int, ...]:
    """Up to `most` token ids."""
    if not isinstance(value, _LISTS):
        raise RequestRejected(f"{name} must be a list of integers, got {value!r:.300}", param=name)
    if len(value) > most:
        raise RequestRejected(f"{name} has {len(value)} tokens, at most {most} are allowed", param=name)
    # A list may hold a quarter of a million tokens: one pass in C where all is well.
    if value and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        return tuple(value)
    return tuple(integer(name, token, 0, MAX_TOKEN_ID) for token in value)


def token_lists(name: str, value: object, *, most: int, max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Up to `most` lists of 1 to `max_tokens` token ids each."""
    if not isinstance(value, _LISTS):
        raise RequestRejected(f"{name} must be a list of lists of integers, got {value!r:.300}", param=name)
    if len(value) > most:
        raise RequestRejected(f"{name} has {len(value)} lists, at most {most} are allowed", param=name)
    found = tuple(tokens(name, one, most=max_tokens) for one in value)
    if () in found:
        raise RequestRejected(f"{name} must hold lists of at least one token, got an empty one", param=name)
    return found


def biases(name: str, value: object, *, most: int, bounds: Bounds) -> tuple[tuple[int, float], ...]:
    """Up to `most` (token, bias) pairs, from those or from a mapping; no token twice."""
    pairs: Iterable[object] = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, _LISTS):
        pairs = value
    elif not isinstance(value, Mapping):
        raise RequestRejected(f"{name} must map token ids to numbers, got {value!r:.300}", param=name)
    if len(value) > most:
        raise RequestRejected(f"{name} has {len(value)} entries, at most {most} are allowed", param=name)
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestRejected(f"{name} must hold pairs of a token id and a number, got {pair!r:.300}", param=name)
        token = integer(name, pair[0], 0, MAX_TOKEN_ID)
        if token in found:
            raise RequestRejected(f"{name} names the token {token} twice", param=name)
        found[token] = number(name, pair[1], bounds)
    return tuple(found.items())
