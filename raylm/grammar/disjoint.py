"""Whether schemas of JSON Schema visibly exclude each other, as oneOf needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from raylm.grammar.keywords import Schema, canonical, types_of


def are_disjoint(options: list[object], place: str, flat: Callable[[object], object]) -> bool:
    """True where no value meets two of the schemas; False also where that is not seen. `flat` takes $ref and allOf out
    of a schema."""
    return all(_two(left, right, place, flat) for index, left in enumerate(options) for right in options[index + 1 :])


def discriminators(options: list[object]) -> list[str]:
    """Names of properties that have fixed values in at least two of the schemas: what may tell them apart, if it were
    required."""
    found: dict[str, int] = {}
    for option in options:
        properties = option.get("properties") if isinstance(option, Mapping) else None
        for name, value in properties.items() if isinstance(properties, Mapping) else ():
            found[name] = found.get(name, 0) + (_values(value) is not None)
    return [name for name, times in found.items() if times > 1]


def _two(left: object, right: object, place: str, flat: Callable[[object], object]) -> bool:
    if left is False or right is False:
        return True
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        return False
    if {"anyOf", "oneOf"} & (left.keys() | right.keys()):
        return False
    values = _values(left), _values(right)
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    if "type" in left and "type" in right:
        types = _widened(types_of(left, place)), _widened(types_of(right, place))
        if not types[0] & types[1]:
            return True
        if types[0] == types[1] == {"object"}:
            return _told_apart(left, right, flat)
    return False


def _told_apart(left: Schema, right: Schema, flat: Callable[[object], object]) -> bool:
    """They have a required property whose values differ."""
    both = _required(left) & _required(right)
    for name in sorted(both):
        ours, theirs = (_values(flat(one["properties"][name])) for one in (left, right))  # type: ignore[index]
        if ours is not None and theirs is not None and not ours & theirs:
            return True
    return False


def _required(schema: Schema) -> set[str]:
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        return set()
    return {name for name in required if isinstance(name, str) and name in properties}


def _values(schema: object) -> set[str] | None:
    """The values of enum or const, as text; None without them."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return {canonical(schema["const"])}
    values = schema.get("enum")
    return {canonical(value) for value in values} if isinstance(values, list) else None


def _widened(types: frozenset[str]) -> set[str]:
    return {"number" if name == "integer" else name for name in types}
