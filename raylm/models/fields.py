"""Typed access to the values of a model's own configuration (config.json, GGUF metadata)."""

from __future__ import annotations

from collections.abc import Mapping

from raylm.errors import ConfigError

_MOST_OF_ALL = 2**31 - 1
MOST_POSITIONS = 2**24
_MOST = {
    "num_hidden_layers": 4096,
    "block_count": 4096,
    "max_position_embeddings": MOST_POSITIONS,
    "context_length": MOST_POSITIONS,
}
"""Of what is made before any weight is read, a list of layers and tables of positions, many times what models have."""
_LARGEST = 1e30


class Fields:
    """Reads fields of a mapping. A missing one is as in `defaults`; a null one takes the method's default, or is an
    error where there is none.

    Every method raises ConfigError naming the file, the field, its value and what is allowed.
    """

    def __init__(self, values: Mapping[str, object], source: str, defaults: Mapping[str, object] | None = None) -> None:
        self.values = values
        self._defaults = defaults or {}
        self.source = source

    def having(self, **values: object) -> Fields:
        """The same, with these values in place of its own."""
        return Fields({**self.values, **values}, self.source, self._defaults)

    def get(self, name: str) -> object:
        """The raw value, or None."""
        return self.values[name] if name in self.values else self._defaults.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer of a size that a model may have."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, value, "a positive integer")
        if value > (most := _MOST.get(name.rpartition(".")[2], _MOST_OF_ALL)):
            raise self.error(name, value, f"a positive integer of at most {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number, or 0 where that is the default."""
        value = self._value(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value <= _LARGEST or value == default):
            raise self.error(name, value, "a positive number")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self._value(name, None)
        numbers = value if isinstance(value, list) else [None]
        if any(type(each) not in (int, float) or not 0 < each <= _LARGEST for each in numbers):
            raise self.error(name, value, "a list of positive numbers")
        return tuple(float(each) for each in numbers)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token, a list of tokens, or none."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token <= _MOST_OF_ALL for token in ids):
            raise self.error(name, value, "a token id or a list of them")
        return tuple(ids)

    def section(self, name: str) -> Fields:
        """A nested mapping; empty where it is missing."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(name, value, "a mapping")
        return Fields(value, f"{self.source}: {name}")

    def error(self, name: str, value: object, allowed: str) -> ConfigError:
        """The error for a field whose value cannot be used."""
        try:
            given = f"{value!r:.200}"
        except ValueError:  # an integer of too many digits to be written
            given = "too long to be shown"
        return ConfigError(f"{self.source}: {name} is {given}; allowed: {allowed}")

    def _value(self, name: str, default: object) -> object:
        value = self.get(name)
        if value is None and default is None:
            raise ConfigError(f"{self.source}: {name} is missing")
        return default if value is None else value
