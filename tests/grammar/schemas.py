"""200 JSON schemas that can be met, written by hand and generated, and more than 50 that are impossible or hostile."""

from __future__ import annotations

from raylm.bench.schemas import FORMATS, INTEGER, PATTERNS, STRING, Schema, mixed_schemas

NODE: Schema = {
    "type": "object",
    "properties": {"value": INTEGER, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "additionalProperties": False,
}

CLOSED_A: Schema = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": False}
CAT: Schema = {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat"}, "n": INTEGER}}
DOG: Schema = {"type": "object", "properties": {"kind": {"const": "dog"}, "s": STRING}, "additionalProperties": False}
PAIR: Schema = {
    "type": "object",
    "properties": {
        "kind": {"const": "pair"},
        "left": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/pair"}]},
        "right": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["left", "right"],
}
COMPOSED: list[Schema] = [
    {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}}
    | {"$defs": {"cat": CAT, "dog": DOG}},
    {"oneOf": [CAT, DOG, {"type": "null"}]},
    {"type": "object", "oneOf": [CAT, DOG]},
    {"$ref": "#/$defs/pair", "$defs": {"pair": PAIR, "leaf": CAT}},
    {**CLOSED_A, "properties": {"a": INTEGER, "b": STRING}, "required": []}
    | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {
        "allOf": [
            {"properties": {"a": INTEGER, "b": INTEGER}},
            CLOSED_A | {"properties": {"a": {}, "b": {"minimum": 3}}},
        ]
    },
    {"$ref": "#/$defs/a", "properties": {"b": INTEGER}, "unevaluatedProperties": False}
    | {"$defs": {"a": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}}},
    {"allOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": STRING}}], "unevaluatedProperties": False},
    {"anyOf": [{"properties": {"a": INTEGER}}, {"properties": {"b": STRING}}], "unevaluatedProperties": False}
    | {"type": "object", "properties": {"c": INTEGER}, "required": ["c"]},
    {"allOf": [{"additionalProperties": INTEGER}], "unevaluatedProperties": False},
    {"allOf": [{"type": "array", "prefixItems": [INTEGER]}], "unevaluatedItems": False},
    {"type": "array", "items": INTEGER, "unevaluatedItems": False},
    {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": INTEGER}
    | {"required": ["a", "b"]},
    {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/n"},
        "minProperties": 2,
        "$defs": {"n": {"enum": ["a", "b"]}},
    },
    {"properties": {"a": INTEGER, "z": INTEGER}, "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": STRING},
    {"type": "string", "contentMediaType": "application/json", "contentSchema": {"type": "object"}},
    {"allOf": [{"enum": [1, 2]}, {"enum": [True, 2]}]},
    {"allOf": [{"enum": [1, 2]}, {"const": 1.0}]},
    {"oneOf": [{"const": 1}, {"const": True}]},
    {"type": "array", "items": INTEGER, "maxItems": 2**31 - 1},
    {"type": "string", "maxLength": 2**31 - 1},
]
"""Schemas made of several, closed ones among them."""

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
LENGTHS_OF_PATTERNS: list[Schema] = [
    {"type": "string", "pattern": "^[a-f]+$", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-f]{2}$", "maxLength": 9},
    {"type": "string", "format": "uuid", "minLength": 36},
    {"type": "string", "pattern": "^[a-z][a-z0-9_]*$", "minLength": 3, "maxLength": 20},
    {"type": "string", "pattern": "^[A-Z]{2}-[^-]{1,9}x$", "minLength": 6, "maxLength": 8},
    {"type": "string", "pattern": r"^\"[\"\\a]+$", "maxLength": 4},
]
NUM_VALID = 200


def valid_schemas() -> list[Schema]:
    """NUM_VALID schemas, the same every time."""
    found = [*HAND_WRITTEN, *COMPOSED, *LENGTHS_OF_PATTERNS]
    found += [{"type": "string", "pattern": pattern} for pattern in PATTERNS]
    found += [{"type": "string", "format": name} for name in FORMATS]
    return found + mixed_schemas(NUM_VALID - len(found))


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
    ({"type": "string", "pattern": "^a*b*$", "maxLength": 2}, "one character class"),
    ({"type": "string", "pattern": "^a(bc)*$", "maxLength": 2}, "one character class"),
    ({"type": "string", "pattern": "^abc$", "maxLength": 2}, "no match has a length"),
    ({"type": "string", "pattern": "^a$", "format": "date"}, "together with format"),
    ({"type": "string", "format": "bogus"}, "'bogus'"),
    ({"type": "string", "format": "uri", "maxLength": 20}, "'uri' needs a maxLength of at least 26, got 20"),
    ({"type": "string", "format": "uri", "minLength": 4, "maxLength": 99}, "a minLength of up to 3, got 4"),
    ({"type": "string", "format": "uri", "minLength": 4}, "the format 'uri': "),
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
    (
        {"allOf": [{"prefixItems": [INTEGER]}, {"items": STRING}], "type": "array"},
        "items together with prefixItems of another schema",
    ),
    ({"type": "array", "prefixItems": [INTEGER], "allOf": [{"items": False}]}, "items together with prefixItems"),
    ({"type": "array", "allOf": [{"unevaluatedItems": False}, {"prefixItems": [INTEGER]}]}, "items together with"),
    (
        {"allOf": [{"patternProperties": {"^x[a-z]*$": INTEGER}}, {"additionalProperties": False}]},
        "additionalProperties together with patternProperties",
    ),
    (
        {"allOf": [{"properties": {"b": INTEGER}}, {"type": "object", "unevaluatedProperties": False}]},
        "additionalProperties together with properties of another schema",
    ),
    (
        {"allOf": [{"anyOf": [{"properties": {"a": INTEGER}}], "unevaluatedProperties": False}, {"required": ["b"]}]},
        "unevaluatedProperties together with another schema",
    ),
    ({"unevaluatedProperties": INTEGER}, "unevaluatedProperties is supported only as false"),
    ({"allOf": [{"const": 1}, {"const": True}]}, "no text can match"),
    (
        {"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": True}}}], "required": ["a"]},
        "#/properties/a: no text can match",
    ),
    ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "exclude each other"),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": 1.0}}, "required": ["k"]},
            ]
        },
        "exclude each other",
    ),
    ({"oneOf": [CAT, CAT | {"title": "other"}]}, "exclude each other"),
    ({"propertyNames": {"enum": ["a"]}, "required": ["b"]}, "required names 'b'"),
    ({"type": "array", "minItems": 2**53 - 1}, "minItems 9007199254740991 is over the limit of 2147483647"),
    ({"type": "string", "maxLength": 2**32}, "maxLength 4294967296 is over the limit of 2147483647"),
    ({"type": "object", "maxProperties": 1e300}, "over the limit of 2147483647"),
    ({"properties": {"a": {"properties": {"b": False}, "required": ["b"]}}, "required": ["a"]}, "#/properties/a/pro"),
    ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}, "#/$defs/x: a schema leads"),
    (
        {"properties": {"a": {"items": {"$ref": "#/$defs/x"}, "minItems": 1}}, "required": ["a"]}
        | {"$defs": {"x": {"properties": {"y": {"$ref": "#/$defs/x"}}, "required": ["y"]}}},
        "#/$defs/x: no text",
    ),
    ({"nullable": True, "type": "string"}, "'nullable'"),
    (_nested(80), "nests deeper than 64"),
]
"""Schemas that no answer can meet, or that cannot be kept to, and what the refusal says."""
