"""JSON schemas drawn at random: what structured output is tested and measured with."""

from __future__ import annotations

import random
from typing import Any

Schema = Any
INTEGER: Schema = {"type": "integer"}
STRING: Schema = {"type": "string"}
# fmt: off
PATTERNS = [
    "^a+$", "[^a]+", ".*", "^.{3}$", "a|b", "^a|b$", r"^\d{3}-\w+$", r"\s", r'^"x\\y"$', "^[é-ü]+$", "ab*$", "^$", "",
    "^(?:x|y)z$", r"^[^\W\d]+$", r"^\S{1,5}@\S+$", r"^[\]\\\"]$", r"^\x41\u0042$", "a??b", "^[^\\x00-\\x1f]$", "^\n$",
    r"^\/$", r"^(?:[a-z]+\.)+[a-z]{2,3}$", r"^\D+$", "^[😀-😏]{2}$", r"^(a|(b|c)d?)*$",
]
# fmt: on
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]


def mixed_schemas(count: int, *, seed: int = 16) -> list[Schema]:
    """Schemas of objects, the same for the same seed: nested objects and arrays with limits, enums, patterns, formats,
    references, alternatives and names that are not ASCII."""
    rng = random.Random(seed)
    return [_Maker(rng).schema() for _ in range(count)]


class _Maker:
    """Makes one random schema."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defs: dict[str, Schema] = {}

    def schema(self) -> Schema:
        for name in ("first", "second"):
            self._defs[name] = self._leaf()
        made = dict(self._object(3))
        made["$defs"] = self._defs
        return made

    def _any(self, depth: int) -> Schema:
        kinds = [self._leaf, self._leaf, self._ref]
        if depth:
            kinds += [
                lambda: self._object(depth - 1),
                lambda: self._array(depth - 1),
                lambda: {"anyOf": [self._any(depth - 1), {"type": "null"}]},
            ]
        made = self._rng.choice(kinds)()
        if self._rng.random() < 0.2:
            made = {**made, "title": "Überschrift", "description": "what it is"}
        return made

    def _ref(self) -> Schema:
        return {"$ref": f"#/$defs/{self._rng.choice(['first', 'second'])}"}

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(["id", "name", "größe", "tags", "x y", "名前", "zip", 'q"uote', "nested"], 4)
        properties = {name: self._any(depth) for name in names[: self._rng.randint(1, 4)]}
        made: Schema = {"type": "object", "properties": properties}
        made["required"] = [name for name in properties if self._rng.random() < 0.6]
        if self._rng.random() < 0.5:
            made["additionalProperties"] = self._rng.choice([False, INTEGER, {"type": "boolean"}])
        return made

    def _array(self, depth: int) -> Schema:
        low = self._rng.randint(0, 2)
        made: Schema = {"type": "array", "items": self._any(depth), "maxItems": low + self._rng.randint(0, 3)}
        return {**made, "minItems": low} if low else made

    def _leaf(self) -> Schema:
        low = self._rng.randint(-50, 50)
        return self._rng.choice(
            [
                INTEGER,
                STRING,
                {"type": "boolean"},
                {"type": "number", "minimum": low / 4, "maximum": low / 4 + self._rng.randint(1, 9) / 8},
                {"type": "integer", "minimum": low, "maximum": low + self._rng.randint(0, 200)},
                {"type": "string", "minLength": self._rng.randint(0, 3), "maxLength": self._rng.randint(3, 15)},
                {"type": "string", "pattern": self._rng.choice(PATTERNS)},
                {"type": "string", "format": self._rng.choice(FORMATS)},
                {"enum": ["rot", "grün", "blau"][: self._rng.randint(1, 3)]},
                {"const": self._rng.choice([1, "ß", None, [1, "x"]])},
            ]
        )
