"""200 JSON schemas that can be met, written by hand and generated, and more than 50 that are impossible or hostile."""

from __future__ import annotations

import random
from typing import Any

Schema = Any
INTEGER: Schema = {"type": "integer"}
STRING: Schema = {"type": "string"}
NODE: Schema = {
    "type": "object",
    "properties": {"value": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}

HAND_WRITTEN: list[Schema] = [
    True,
    {},
    {"type": "object"},
    {"type": "array"},
    {"type": "null"},
    {"type": "boolean"},
    {"type": ["string", "null"]},
    {"type": "object", "properties": {"a": INTEGER, "b": STRING}, "required": ["a"]},
    {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING},
    {"type": "object", "properties": {"ab": INTEGER, "ac": INTEGER, "": INTEGER}, "additionalProperties": STRING},
    {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "minProperties": 2},
    {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "maxProperties": 1},
    {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2, "minProperties": 1},
    {"type": "object", "required": ["z"]},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "z"], "additionalProperties": True},
    {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
    {"type": "object", "properties": {"a": False, "b": INTEGER}},
    {"type": "object", "patternProperties": {"^x[a-z]*$": INTEGER}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {"type": "object", "properties": {'é"\n': INTEGER, "日本": STRING}, "required": ['é"\n']},
    {"type": "object", "properties": {"a/b": INTEGER, "~": {"$ref": "#/properties/a~1b"}}, "required": ["a/b", "~"]},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
    {"type": "array", "prefixItems": [INTEGER, STRING], "items": INTEGER, "minItems": 3},
    {"type": "array", "prefixItems": [INTEGER, STRING], "maxItems": 1},
    {"type": "array", "prefixItems": [INTEGER], "minItems": 2},
    {"type": "array", "items": False},
    {"type": "integer", "minimum": 3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    {"type": "integer", "minimum": 1.5, "maximum": 3.5},
    {"type": "integer", "maximum": -7},
    {"type": "integer", "minimum": -105, "maximum": 1099},
    {"type": "integer", "minimum": 10**18, "maximum": 10**19},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "minimum": 1e-7, "maximum": 2e-7},
    {"type": "number", "maximum": -0.5},
    {"type": ["integer", "number"], "minimum": 3},
    {"minimum": 3},
    {"minLength": 3},
    {"type": ["string", "integer"], "minLength": 2, "minimum": 5},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "minLength": 1, "maxLength": 40},
    {"type": "string", "maxLength": 0},
    {"enum": [1, "a", None, {"x": [1, 2]}, 1.5, True]},
    {"type": "string", "enum": ["a", 1, "ü"]},
    {"enum": ["a", "b"], "const": "b"},
    {"const": {"é": '"\n'}},
    {"type": "string", "enum": ["\u2028", "😀", "\t"]},
    {"anyOf": [INTEGER, STRING], "minimum": 3},
    {"oneOf": [INTEGER, STRING, {"type": "null"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": 1}, "v": STRING}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": 2}, "w": INTEGER}, "required": ["k"]},
        ]
    },
    {"allOf": [INTEGER, {"minimum": 3}, {"maximum": 20}]},
    {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": INTEGER}, "required": ["b"]}]}
    | {"$defs": {"a": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}}},
    {"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INTEGER}},
    {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    {"properties": {"children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}, "name": STRING}},
]
# fmt: off
PATTERNS = [
    "^a+$", "[^a]+", ".*", "^.{3}$", "a|b", "^a|b$", r"^\d{3}-\w+$", r"\s", r'^"x\\y"$', "^[é-ü]+$", "ab*$", "^$", "",
    "^(?:x|y)z$", r"^[^\W\d]+$", r"^\S{1,5}@\S+$", r"^[\]\\\"]$", r"^\x41\u0042$", "a??b", "^[^\\x00-\\x1f]$", "^\n$",
    r"^\/$", r"^(?:[a-z]+\.)+[a-z]{2,3}$", r"^\D+$", "^[😀-😏]{2}$", r"^(a|(b|c)d?)*$",
]
# fmt: on
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
LENGTHS_OF_PATTERNS: list[Schema] = [
    {"type": "string", "pattern": "^[a-f]+$", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2}$", "maxLength": 9},
    {"type": "string", "format": "uuid", "minLength": 36},
]
NUM_VALID = 200


def valid_schemas() -> list[Schema]:
    """NUM_VALID schemas, the same every time."""
    found = [*HAND_WRITTEN, *LENGTHS_OF_PATTERNS]
    found += [{"type": "string", "pattern": pattern} for pattern in PATTERNS]
    found += [{"type": "string", "format": name} for name in FORMATS]
    rng = random.Random(16)
    while len(found) < NUM_VALID:
        found.append(_Maker(rng).schema())
    return found


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


def _nested(depth: int) -> Schema:
    made: Schema = INTEGER
    for _ in range(depth):
        made = {"type": "array", "items": made}
    return made


REFUSED: list[tuple[Schema, str]] = [
    (False, "no text can match"),
    ("string", "a schema must be an object or a boolean"),
    ({"enum": []}, "enum must be a list"),
    ({"type": "integer", "enum": ["a"]}, "none of the values"),
    ({"enum": ["a"], "const": "b"}, "none of the values"),
    ({"type": "string", "enum": ["aaa"], "maxLength": 2}, "maxLength together with enum"),
    ({"type": []}, "type must be"),
    ({"type": "foo"}, "'foo'"),
    ({"type": 5}, "type must be"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "no integer is between"),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "no integer is between"),
    ({"type": "number", "minimum": 2, "maximum": 1}, "no number is between"),
    ({"type": "number", "minimum": "1"}, "minimum must be a number"),
    ({"type": "number", "minimum": 10**50}, "40 digits"),
    ({"type": "integer", "multipleOf": 5}, "multipleOf"),
    ({"type": "string", "minLength": 5, "maxLength": 4}, "minLength 5 is over maxLength 4"),
    ({"type": "string", "minLength": -1}, "minLength must be"),
    ({"type": "string", "minLength": 1000}, "minLength 1000"),
    ({"type": "string", "maxLength": 1.5}, "maxLength must be"),
    ({"type": "string", "pattern": 5}, "pattern must be a string"),
    ({"type": "string", "pattern": "("}, "position 0"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "lookahead"),
    ({"type": "string", "pattern": r"(a)\1"}, "backreference"),
    ({"type": "string", "pattern": r"\bfoo"}, "word boundary"),
    ({"type": "string", "pattern": "a$b"}, "$ is supported only at the end"),
    ({"type": "string", "pattern": "b^a"}, "^ is supported only at the beginning"),
    ({"type": "string", "pattern": r"^\p{L}$"}, "bad escape"),
    ({"type": "string", "pattern": "(?i)a"}, "flags"),
    ({"type": "string", "pattern": "a++"}, "possessive"),
    ({"type": "string", "pattern": "[^\\s\\S]"}, "holds no character"),
    ({"type": "string", "pattern": "a{9999999}"}, "9999999"),
    ({"type": "string", "pattern": "(" * 200 + ")" * 200}, "nests deeper"),
    ({"type": "string", "pattern": "^ab|cde$", "maxLength": 2}, "one character class"),
    ({"type": "string", "pattern": "^abc$", "maxLength": 2}, "no match has a length"),
    ({"type": "string", "pattern": "^a$", "format": "date"}, "together with format"),
    ({"type": "string", "format": "bogus"}, "'bogus'"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems 3 is over maxItems 2"),
    ({"type": "array", "items": False, "minItems": 1}, "minItems 1 is over the 0 items"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": INTEGER}, "'contains'"),
    ({"type": "array", "items": [INTEGER]}, "prefixItems"),
    ({"type": "array", "prefixItems": []}, "prefixItems must be a list"),
    ({"type": "object", "properties": []}, "properties must be an object"),
    ({"type": "object", "required": "a"}, "required must be a list"),
    ({"type": "object", "required": ["z"], "additionalProperties": False}, "required names 'z'"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "no text can match"),
    ({"type": "object", "properties": {"a": INTEGER}, "minProperties": 2}, "minProperties 2 is over the 1"),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "maxProperties": 0}, "maxProperties 0"),
    ({"type": "object", "minProperties": 3}, "minProperties over 1"),
    ({"type": "object", "properties": {"a": INTEGER}, "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    ({"type": "object", "properties": {"a": INTEGER}, "patternProperties": {"^a": STRING}}, "patternProperties"),
    ({"type": "object", "properties": {"a": {"type": "array", "minItems": 2, "maxItems": 1}}}, "#/properties/a: "),
    ({"anyOf": []}, "anyOf must be a list"),
    ({"anyOf": [{"not": {}}]}, "#/anyOf/0: "),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "exclude each other"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "two different values of pattern"),
    ({"allOf": [INTEGER, STRING]}, "no text can match"),
    ({"not": INTEGER}, "'not'"),
    ({"if": INTEGER, "then": {"minimum": 3}}, "'if'"),
    ({"$ref": "#/$defs/y"}, "points to nothing"),
    ({"$ref": "http://x/y"}, "#/..."),
    ({"$ref": "#"}, "leads back to itself"),
    ({"anyOf": [{"$ref": "#"}]}, "leads back to itself"),
    ({"allOf": [{"$ref": "#"}]}, "without end"),
    ({"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}, "goes on without end"),
    ({"nullable": True, "type": "string"}, "'nullable'"),
    (_nested(80), "nests deeper than 64"),
]
"""Schemas that no answer can meet, or that cannot be kept to, and what the refusal says."""
