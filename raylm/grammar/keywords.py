"""The keywords of JSON Schema (draft 2020-12): which are kept to, which change nothing, and two schemas as one.

A keyword in none of the tables is refused by its name: a model must not be asked for less than the schema says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TypeGuard

from raylm.grammar.fault import Fault

Schema = Mapping[str, object]
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions", "discriminator", "contentMediaType", "contentEncoding"),
        "contentSchema",
    }
)
"""They say nothing of which values are valid."""
OBJECT = frozenset(
    {
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties"),
        *("propertyNames", "unevaluatedProperties"),
    }
)
ARRAY = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"})
STRING = frozenset({"minLength", "maxLength", "pattern", "format"})
NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
VALUES = frozenset({"type", "enum", "const"})
OF_TYPE = {"object": OBJECT, "array": ARRAY, "string": STRING, "number": NUMBER}
KEPT = OBJECT | ARRAY | STRING | NUMBER | COMBINED | VALUES
COUNTS = frozenset(
    {"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"},
)
MAX_COUNT = 2**31 - 1
"""xgrammar counts with 32 bits."""
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}


def check_keywords(schema: Schema, place: str) -> None:
    """Raises Fault for a keyword that is not kept to, and for a value of the wrong type."""
    for name, value in schema.items():
        if name not in KEPT and name not in ANNOTATIONS and not name.startswith("x-"):
            raise Fault(f"the keyword {name!r:.100} is not supported", place)
        if name in COUNTS:
            count(schema, name, place)
        elif name in NUMBER and not is_number(value):
            raise Fault(f"{name} must be a number, got {value!r:.100}", place)
        elif name in ("pattern", "format", "$ref") and not isinstance(value, str):
            raise Fault(f"{name} must be a string, got {value!r:.100}", place)
    if schema.get("$id") and place != "#":
        raise Fault("$id is supported only at the root", place)


def count(schema: Schema, name: str, place: str) -> int | None:
    """The value of a keyword that is a number of something; None where it is left out."""
    value = schema.get(name)
    if value is None and name not in schema:
        return None
    if not is_whole(value) or value < 0:
        raise Fault(f"{name} must be an integer of at least 0, got {shown(value)}", place)
    if value > MAX_COUNT:
        raise Fault(f"{name} {shown(value)} is over the limit of {MAX_COUNT}", place)
    return int(value)


def shown(value: object) -> str:
    text = str(value) if isinstance(value, Decimal) else repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def is_number(value: object) -> TypeGuard[int | Decimal]:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int | Decimal]:
    """Whether it is a number without a fraction. Without `int`, which writes out a billion digits of 1e1000000000."""
    return is_number(value) and (isinstance(value, int) or value == value.to_integral_value())


def types_of(schema: Schema, place: str) -> frozenset[str]:
    """The types that a value may have; without `type`, those that the other keywords speak of (any, without such)."""
    given = schema.get("type")
    if given is None and "type" not in schema:
        spoken = {name for name, keywords in OF_TYPE.items() if keywords & schema.keys()}
        return frozenset(spoken or set(TYPES) - {"integer"})
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names:
        raise Fault(f"type must be a name or a list of names, got {shown(given)}", place)
    for name in names:
        if name not in TYPES:
            raise Fault(f"type must be one of {', '.join(TYPES)}, got {shown(name)}", place)
    found = set(names)
    return frozenset(found - {"integer"} if "number" in found else found)


def canonical(value: object) -> str:
    """A text that is the same for the same JSON value: 1 and 1.0 are one value, 1 and true are two."""
    if is_number(value):
        sign, digits, exponent = Decimal(value).as_tuple()
        written = "".join(map(str, digits))
        short = written.rstrip("0")
        return f"{'-' if sign else ''}{short}e{int(exponent) + len(written) - len(short)}" if short else "0"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


def plain(schema: Schema) -> dict[str, object]:
    """The keywords that say which values are valid."""
    return {name: value for name, value in schema.items() if name in KEPT}


def merged(left: object, right: object, place: str) -> object:
    """One schema for the values that meet both; neither has $ref or allOf. Raises Fault where none can say it."""
    if isinstance(left, bool) or isinstance(right, bool):
        return right if left is True else left if right is True else False
    assert isinstance(left, Mapping) and isinstance(right, Mapping)
    _check_closing(left, right, place)
    result = dict(left)
    for name, value in right.items():
        if name not in result or _same(result[name], value):
            result[name] = value
        elif name == "type":
            both = _shared_types(types_of({"type": result[name]}, place), types_of({"type": value}, place))
            if not both:
                return False
            result[name] = both
        elif name in _MERGED:
            result[name] = _MERGED[name](result[name], value)
        elif name == "const":
            return False
        else:
            raise Fault(f"two different values of {name} for the same value are not supported", place)
    return result


def _check_closing(left: Schema, right: Schema, place: str) -> None:
    """additionalProperties speaks of the names beside those of its own schema, and items of the items behind its own
    prefixItems: where another schema adds some, what they say of these is lost."""
    for one, other in ((left, right), (right, left)):
        for name, same_kind in (("unevaluatedProperties", OBJECT), ("unevaluatedItems", ARRAY)):
            if name in one and other.keys() & (same_kind | COMBINED):
                raise Fault(f"{name} together with another schema for the same value", place)
        if "additionalProperties" in one:
            names, own = other.get("properties"), one.get("properties")
            known = own if isinstance(own, Mapping) else {}
            if isinstance(names, Mapping) and names.keys() - known.keys():
                raise Fault("additionalProperties together with properties of another schema for the same value", place)
            if "patternProperties" in other and not _same(other["patternProperties"], one.get("patternProperties", {})):
                raise Fault("additionalProperties together with patternProperties of another schema", place)
        if "items" in one and "prefixItems" in other and not _same(other["prefixItems"], one.get("prefixItems", [])):
            raise Fault("items together with prefixItems of another schema for the same value", place)


def without_unevaluated(schema: Schema, place: str) -> tuple[dict[str, object], frozenset[str]]:
    """A schema without unevaluatedProperties and unevaluatedItems, and which of them it had. Raises Fault where they
    are not false."""
    found = frozenset(_UNEVALUATED.keys() & schema.keys())
    for name in sorted(found):
        if schema[name] is not False:
            raise Fault(f"{name} is supported only as false", place)
    return {name: value for name, value in schema.items() if name not in found}, found


def closed(schema: Schema, unevaluated: frozenset[str]) -> dict[str, object]:
    """A schema and what it said as unevaluated..., which sees what its $ref and allOf say. Beside anyOf and oneOf it
    stays: it sees what these say too."""
    result = dict(schema)
    for name in unevaluated:
        if "anyOf" in schema or "oneOf" in schema:
            result[name] = False
        else:
            result.setdefault(_UNEVALUATED[name], False)
    return result


def _same(left: object, right: object) -> bool:
    return canonical(left) == canonical(right)


def _shared_types(left: frozenset[str], right: frozenset[str]) -> list[str]:
    both = set(left & right)
    for one, other in ((left, right), (right, left)):
        if "integer" in one and "number" in other:
            both.add("integer")
    return sorted(both)


def _both(left: object, right: object) -> object:
    return {"allOf": [left, right]}


def _properties(left: object, right: object) -> object:
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        return left if not isinstance(left, Mapping) else right
    result = dict(left)
    for name, value in right.items():
        result[name] = value if name not in result or _same(result[name], value) else _both(result[name], value)
    return result


def _union(left: object, right: object) -> object:
    if not isinstance(left, list) or not isinstance(right, list):
        return left if not isinstance(left, list) else right
    return left + [name for name in right if name not in left]


def _common(left: object, right: object) -> object:
    if not isinstance(left, list) or not isinstance(right, list):
        return left if not isinstance(left, list) else right
    others = {canonical(value) for value in right}
    return [value for value in left if canonical(value) in others]


def _greater(left: object, right: object) -> object:
    return max(Decimal(str(left)), Decimal(str(right)))


def _less(left: object, right: object) -> object:
    return min(Decimal(str(left)), Decimal(str(right)))


_MERGED: dict[str, Callable[[object, object], object]] = {
    "properties": _properties,
    "required": _union,
    "enum": _common,
    "items": _both,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), _greater),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), _less),
}
