"""What the configurations of several quantisation methods share. Without torch."""

from __future__ import annotations

from collections.abc import Iterable

from raylm.models.fields import Fields

MOST_COLUMNS = 1 << 16
"""Of a group of values that share a scale; real ones have 16 to 1,024."""


def bits_of(fields: Fields, *names: str, allowed: Iterable[int]) -> int:
    """The first of `names` that is there. Raises ConfigError."""
    name = _given(fields, names)
    bits, allowed = fields.integer(name), tuple(allowed)
    if bits not in allowed:
        raise fields.error(name, bits, f"one of {', '.join(map(str, allowed))}")
    return bits


def group_of(fields: Fields, *names: str, default: int | None = None) -> int:
    """Columns that share a scale; -1 in the file, 0 here: all of a row. Raises ConfigError."""
    name = _given(fields, names)
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if value == -1 and not isinstance(value, bool):
        return 0
    size = fields.integer(name)
    if size > MOST_COLUMNS:
        raise fields.error(name, size, f"-1 (all of a row), or 1 to {MOST_COLUMNS}")
    return size


def block_of(fields: Fields, name: str) -> tuple[int, int]:
    """Rows and columns of a block of values that share a scale. Raises ConfigError."""
    value = fields.get(name)
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or any(type(size) is not int or not 1 <= size <= MOST_COLUMNS for size in value):
        raise fields.error(name, value, f"a list of two integers from 1 to {MOST_COLUMNS}")
    return value[0], value[1]


def names_of(fields: Fields, *names: str) -> tuple[str, ...]:
    """Lists of names of modules, one behind the other. Raises ConfigError."""
    found: list[str] = []
    for name in names:
        value = fields.get(name)
        value = [value] if isinstance(value, str) else value or []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise fields.error(name, value, "a list of names of modules")
        found += value
    return tuple(found)


def choice(fields: Fields, name: str, allowed: Iterable[str], default: str | None = None) -> str:
    """One of several words. Raises ConfigError."""
    value = fields.get(name) or default
    allowed = tuple(allowed)
    if value not in allowed:
        raise fields.error(name, value, f"one of {', '.join(allowed)}")
    return str(value)


def _given(fields: Fields, names: tuple[str, ...]) -> str:
    return next((name for name in names if fields.get(name) is not None), names[0])
