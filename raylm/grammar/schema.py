"""JSON Schema (draft 2020-12) as a grammar: every text of it is JSON that the schema validates.

The other way round it is narrower where a model gains nothing by the freedom: properties come in the schema's order;
an object with `properties` has no others unless additionalProperties says so; patterns match the whole string; white
space between elements is one space, or a line's end and an indent; numbers have limited length. A schema without `type`
is read as of the types that its keywords speak of. What cannot be kept to exactly is refused, with its place.

Not taken from xgrammar, whose converter (0.2.8) leaves out `required` names without a property, siblings of $ref, enum
and anyOf, all but the first schema of allOf, `not`, `contains` and `uniqueItems` without a word, and lets through bytes
that are no UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from urllib.parse import unquote

from raylm.grammar.disjoint import are_disjoint, discriminators
from raylm.grammar.ebnf import NEVER, SPACE, Expr, Rule, Rules, Text, alt, is_never, maybe, repeat, seq
from raylm.grammar.fault import Fault
from raylm.grammar.json_reader import read_json
from raylm.grammar.json_rules import define_json, plain_number
from raylm.grammar.keywords import (
    ARRAY,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    canonical,
    check_keywords,
    closed,
    count,
    is_whole,
    merged,
    plain,
    shown,
    types_of,
    without_unevaluated,
)
from raylm.grammar.numbers import Bounds, integer, number
from raylm.grammar.objects import Extra, ObjectRules, Property, other_keys
from raylm.grammar.regex import regex
from raylm.grammar.strings import quoted_pattern, string

JSON_WORDS: Mapping[str, str] = {"true": "true", "false": "false", "null": "null"}
PYTHON_WORDS: Mapping[str, str] = {"true": "True", "false": "False", "null": "None"}
MAX_DEPTH = 64
MAX_RULES = 100_000
_MAX_DISCRIMINATORS = 8
_MAX_BOUND = Decimal(10) ** 40


def schema_grammar(text: str) -> str:
    """The grammar of a schema, given as JSON. Raises Fault."""
    return SchemaGrammar(read_json(text, "the schema", parse_float=Decimal)).text()


def object_grammar() -> str:
    """The grammar of any JSON object."""
    return SchemaGrammar({"type": "object"}).text()


class SchemaGrammar:
    """Builds the grammar of one schema; `text` is to be called once."""

    def __init__(
        self, root: object, rules: Rules | None = None, *, prefix: str = "n", words: Mapping[str, str] = JSON_WORDS
    ) -> None:
        """`rules`, with those of `define_json`, are shared by several schemas, whose prefixes of names then differ.
        `words`: how true, false and null are written."""
        self._root = root
        self._rules = Rules() if rules is None else rules
        self._prefix = prefix
        self._words = words
        self._names = 0
        self._targets: dict[tuple[str, str | None], Rule] = {}
        self._numbers: dict[tuple[str, Bounds], Rule] = {}
        if rules is None:
            define_json(self._rules)

    def text(self) -> str:
        return self._rules.text(self.value(self._root, "#"), "#")

    def value(self, schema: object, place: str) -> Expr:
        """The texts of a schema, the root or one within it."""
        return self._value(schema, place, 0)

    def flat(self, schema: object, place: str) -> object:
        """A schema within the root without $ref and allOf."""
        if isinstance(schema, Mapping):
            check_keywords(schema, place)
            return self._flat(plain(schema), place, 0)
        if not isinstance(schema, bool):
            raise Fault(f"a schema must be an object or a boolean, got {shown(schema)}", place)
        return schema

    def _new_name(self) -> str:
        self._names += 1
        if len(self._rules) > MAX_RULES:
            raise Fault(f"the schema makes more than {MAX_RULES} rules")
        return f"{self._prefix}{self._names}"

    def _as_rule(self, expr: Expr, place: str) -> Expr:
        """A rule of its own, so that no expression nests as deep as a schema does."""
        if is_never(expr) or isinstance(expr, Rule | Text):
            return expr
        return self._rules.add(self._new_name(), expr, place=place)

    def _value(self, schema: object, place: str, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            raise Fault(f"the schema nests deeper than {MAX_DEPTH} levels", place)
        if isinstance(schema, bool):
            return self._any() if schema else NEVER
        if not isinstance(schema, Mapping):
            raise Fault(f"a schema must be an object or a boolean, got {shown(schema)}", place)
        check_keywords(schema, place)
        own = plain(schema)
        if own.keys() == {"$ref"}:
            return self._ref(str(own["$ref"]), place, depth)
        flat = self._flat(own, place, depth)
        if not isinstance(flat, Mapping):
            return self._value(flat, place, depth + 1)
        if "anyOf" in flat or "oneOf" in flat:
            return self._choice(flat, place, depth)
        return self._as_rule(self._simple(flat, place, depth), place)

    def _flat(self, schema: Schema, place: str, depth: int) -> object:
        """Without $ref and allOf: what they say stands beside the rest."""
        if depth > MAX_DEPTH:
            raise Fault("$ref and allOf lead on without end", place)
        own, unevaluated = without_unevaluated(schema, place)
        flat: object = {name: value for name, value in own.items() if name not in ("$ref", "allOf")}
        others: list[tuple[object, str]] = []
        if "$ref" in schema:
            others.append((self._target(str(schema["$ref"]), place), str(schema["$ref"])))
        if "allOf" in schema:
            others += [(one, f"{place}/allOf/{i}") for i, one in enumerate(_list(schema, "allOf", place))]
        for other, where in others:
            if isinstance(other, Mapping):
                check_keywords(other, where)
                other = self._flat(plain(other), where, depth + 1)
            elif not isinstance(other, bool):
                raise Fault(f"a schema must be an object or a boolean, got {shown(other)}", where)
            flat = merged(other, flat, place)
        return closed(flat, unevaluated) if isinstance(flat, Mapping) else flat

    def _ref(self, pointer: str, place: str, depth: int, needed: str | None = None) -> Expr:
        """What a $ref points to; `needed` is a property required beside."""
        key = pointer, needed
        if key not in self._targets:
            target = self._target(pointer, place)
            if needed is not None:
                target = {"allOf": [target, {"required": [needed]}]}
            name = self._new_name()
            self._targets[key] = Rule(name)
            self._rules.add(name, self._value(target, pointer, depth + 1), place=pointer)
        return self._targets[key]

    def _target(self, pointer: str, place: str) -> object:
        if pointer != "#" and not pointer.startswith("#/"):
            raise Fault(f"$ref must point into the schema itself (#/...), got {pointer!r:.100}", place)
        found = self._root
        for part in pointer.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and _is_index(name) and int(name) < len(found):
                found = found[int(name)]
            else:
                raise Fault(f"$ref {pointer!r:.100} points to nothing", place)
        return found

    def _choice(self, schema: Schema, place: str, depth: int) -> Expr:
        if "anyOf" in schema and "oneOf" in schema:
            raise Fault("anyOf together with oneOf is not supported", place)
        name = "anyOf" if "anyOf" in schema else "oneOf"
        plain_rest, unevaluated = without_unevaluated(schema, place)
        rest = {key: value for key, value in plain_rest.items() if key != name}
        options = _list(schema, name, place)
        if rest or unevaluated:
            options = [{"allOf": [option, rest], **dict.fromkeys(unevaluated, False)} for option in options]
        needed = self._discriminator(options, place, depth) if name == "oneOf" else None
        found = [
            self._option(option, needed, f"{place}/{name}/{index}", depth + 1) for index, option in enumerate(options)
        ]
        return self._as_rule(alt(option for option in found if not is_never(option)), place)

    def _option(self, option: object, needed: str | None, place: str, depth: int) -> Expr:
        """One schema of anyOf or oneOf; an object of it must have the property `needed`."""
        if needed is None or not _has_property(self._alone(option, place, depth), needed):
            return self._value(option, place, depth)
        if isinstance(option, Mapping) and plain(option).keys() == {"$ref"}:
            # By the reference, for the schemas of a recursive union lead back to it.
            check_keywords(option, place)
            return self._ref(str(option["$ref"]), place, depth, needed)
        return self._value({"allOf": [option, {"required": [needed]}]}, place, depth)

    def _discriminator(self, options: list[object], place: str, depth: int) -> str | None:
        """The property to require of all objects so that the schemas exclude each other; None where they do already.
        pydantic writes Literal["cat"] = "cat" as a property that is not required."""
        flat = [self._alone(option, place, depth) for option in options]
        if self._are_disjoint(flat, place, depth):
            return None
        for name in discriminators(flat)[:_MAX_DISCRIMINATORS]:
            beside = {"required": [name]}
            narrowed = [merged(one, beside, place) if _has_property(one, name) else one for one in flat]
            if self._are_disjoint(narrowed, place, depth):
                return name
        raise Fault("oneOf is supported only where its schemas visibly exclude each other; anyOf may do", place)

    def _are_disjoint(self, flat: list[object], place: str, depth: int) -> bool:
        return are_disjoint(flat, place, lambda one: self._alone(one, place, depth))

    def _alone(self, schema: object, place: str, depth: int) -> object:
        return self._flat({"allOf": [schema]}, place, depth)

    def _simple(self, schema: Schema, place: str, depth: int) -> Expr:
        if "enum" in schema or "const" in schema:
            return self._literals(schema, place)
        options = []
        for name in sorted(types_of(schema, place)):
            if name == "object":
                options.append(self._object(schema, place, depth))
            elif name == "array":
                options.append(self._array(schema, place, depth))
            elif name == "string":
                options.append(string(self._rules, self._new_name(), schema, place))
            elif name in ("integer", "number"):
                options.append(self._number(schema, name, place))
            else:
                options += [Text(self._words[word]) for word in (("true", "false") if name == "boolean" else ("null",))]
        return alt(option for option in options if not is_never(option))

    def _literals(self, schema: Schema, place: str) -> Expr:
        return alt(Text(text) for text in dict.fromkeys(_json(one, self._words) for one in literals(schema, place)))

    def _number(self, schema: Schema, kind: str, place: str) -> Expr:
        """One rule for all numbers of the same kind and bounds: written out each time, they are most of a grammar."""
        if "multipleOf" in schema and not (kind == "integer" and schema["multipleOf"] == 1):
            raise Fault("multipleOf is not supported", place)
        bounds = _bounds(schema, place)
        if bounds == Bounds():
            return plain_number(kind)
        if (kind, bounds) not in self._numbers:
            found = integer(bounds) if kind == "integer" else number(bounds)
            if is_never(found):
                raise Fault(f"no {kind} is between the bounds", place)
            self._numbers[kind, bounds] = self._rules.add(self._new_name(), found)
        return self._numbers[kind, bounds]

    def _object(self, schema: Schema, place: str, depth: int) -> Expr:
        schema = self._with_names(schema, place, depth)
        named = schema.get("properties", {})
        if not isinstance(named, Mapping):
            raise Fault(f"properties must be an object, got {shown(named)}", place)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise Fault(f"required must be a list of names, got {shown(required)}", place)
        rest = schema.get("additionalProperties")  # None: said nowhere, so none beside `properties`
        missing = [name for name in dict.fromkeys(required) if name not in named]
        if missing and (rest is False or "patternProperties" in schema or "propertyNames" in schema):
            raise Fault(f"required names {missing[0]!r:.100}, which the schema does not allow", place)
        schemas = {**named, **dict.fromkeys(missing, True if rest is None else rest)}
        properties = [self._property(name, value, name in required, place, depth) for name, value in schemas.items()]
        low, high = self._limits(schema, "Properties", place)
        extra = self._extra(schema, list(schemas), rest, place, depth)
        if extra is None and low > len(properties):
            raise Fault(f"minProperties {low} is over the {len(properties)} properties that the schema allows", place)
        if high is not None and high < len(set(required)):
            raise Fault(f"maxProperties {high} is under the {len(set(required))} required properties", place)
        if extra is not None and low > max(1, len(set(required))):
            raise Fault("minProperties over 1 is supported only where all properties are named", place)
        return ObjectRules(self._rules, self._new_name(), properties, extra).build(low, high)

    def _property(self, name: str, schema: object, required: bool, place: str, depth: int) -> Property:
        where = f"{place}/properties/{_pointer(name)}"
        value = self._value(schema, where, depth + 1)
        if required and is_never(value):
            # A rule, so that a refusal has the property's place.
            value = self._rules.add(self._new_name(), value, place=where)
        return Property(name, value, required)

    def _with_names(self, schema: Schema, place: str, depth: int) -> Schema:
        """With properties instead of propertyNames that lists them."""
        names = self._alone(schema.get("propertyNames", True), f"{place}/propertyNames", depth)
        named = schema.get("properties", {})
        if (
            not isinstance(names, Mapping)
            or not names.keys() & {"enum", "const"}
            or names.keys() - {"type", "enum", "const"}
            or "patternProperties" in schema
            or not isinstance(named, Mapping)
        ):
            return schema
        rest = schema.get("additionalProperties", "properties" not in schema)
        values = [value for value in _values(names, f"{place}/propertyNames") if isinstance(value, str)]
        listed = {name: named.get(name, rest) for name in values}
        kept = {key: value for key, value in schema.items() if key != "propertyNames"}
        return {**kept, "properties": listed, "additionalProperties": False}

    def _extra(self, schema: Schema, taken: list[str], rest: object, place: str, depth: int) -> Extra | None:
        for name in ("patternProperties", "propertyNames"):
            if name in schema and taken:
                raise Fault(f"{name} together with properties is not supported", place)
        if "patternProperties" in schema:
            return self._pattern_keys(schema, rest, place, depth)
        if rest is False or (rest is None and "properties" in schema):
            return None
        value = self._value(True if rest is None else rest, f"{place}/additionalProperties", depth + 1)
        if "propertyNames" in schema:
            names = {"type": "string"}
            key = self._value({"allOf": [schema["propertyNames"], names]}, f"{place}/propertyNames", depth + 1)
            return Extra(key, value)
        return Extra(other_keys(self._rules, self._new_name(), taken), value)

    def _pattern_keys(self, schema: Schema, rest: object, place: str, depth: int) -> Extra:
        patterns = schema["patternProperties"]
        if not isinstance(patterns, Mapping) or len(patterns) != 1 or "propertyNames" in schema:
            raise Fault("patternProperties is supported only with one pattern and without propertyNames", place)
        if rest not in (None, False):
            raise Fault("patternProperties is supported only with additionalProperties false or left out", place)
        ((pattern, value),) = patterns.items()
        try:
            key = quoted_pattern(self._rules, self._new_name(), regex(pattern, in_json=True))
        except Fault as fault:
            raise Fault(f"the pattern {pattern!r:.100}: {fault}", f"{place}/patternProperties") from None
        where = f"{place}/patternProperties/{_pointer(pattern)}"
        return Extra(self._as_rule(key, where), self._value(value, where, depth + 1))

    def _array(self, schema: Schema, place: str, depth: int) -> Expr:
        if schema.get("uniqueItems", False) is not False:
            raise Fault("uniqueItems is supported only as false", place)
        if isinstance(schema.get("items"), list):
            raise Fault("items must be one schema; a list of them is prefixItems since draft 2020-12", place)
        first = [
            self._value(one, f"{place}/prefixItems/{index}", depth + 1)
            for index, one in enumerate(_list(schema, "prefixItems", place) if "prefixItems" in schema else [])
        ]
        low, high = self._limits(schema, "Items", place)
        is_open = "prefixItems" not in schema or low > len(first)
        item = self._value(schema.get("items", is_open), f"{place}/items", depth + 1)
        if is_never(item) and low > len(first):
            raise Fault(f"minItems {low} is over the {len(first)} items that the schema allows", place)
        return seq(Text("["), self._items(first, item, 0, low, high, place))

    def _items(self, first: list[Expr], item: Expr, index: int, low: int, high: int | None, place: str) -> Expr:
        """What follows after `index` items."""
        close = seq(SPACE, Text("]"))
        comma = Text(",") if index else Text("")
        room = None if high is None else high - index
        if room == 0:
            return close
        if index < len(first):
            more = seq(comma, SPACE, first[index], self._items(first, item, index + 1, low, high, place))
            options = [more, close] if index >= low else [more]
            return self._as_rule(alt(one for one in options if not is_never(one)), place)
        one = seq(SPACE, item)
        least = max(0, low - index)
        if index:
            return seq(repeat(seq(Text(","), one), least, room), close)
        following = repeat(seq(Text(","), one), max(0, least - 1), None if room is None else room - 1)
        some = seq(one, following)
        return seq(some if least else maybe(some), close)

    def _limits(self, schema: Schema, what: str, place: str) -> tuple[int, int | None]:
        low, high = count(schema, f"min{what}", place) or 0, count(schema, f"max{what}", place)
        if high is not None and low > high:
            raise Fault(f"min{what} {low} is over max{what} {high}", place)
        return low, high

    def _any(self) -> Expr:
        """Any JSON value."""
        if "any" not in self._rules:
            self._rules.add("any", NEVER)  # so that what it holds finds it
            kinds: list[object] = ["object", "array", "string", "number", "boolean", "null"]
            options = [self._simple({"type": kind}, "", 0) for kind in kinds]
            self._rules.add("any", alt(options))
        return Rule("any")


def _is_index(name: str) -> bool:
    """Of a list that a schema may hold."""
    return len(name) < 10 and name.isascii() and name.isdigit()


def _list(schema: Schema, name: str, place: str) -> list[object]:
    value = schema[name]
    if not isinstance(value, list) or not value:
        raise Fault(f"{name} must be a list of at least one schema, got {shown(value)}", place)
    return value


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def literals(schema: Schema, place: str) -> list[object]:
    """The values of a schema with enum or const, at least one. Raises Fault."""
    beside = sorted(schema.keys() & (OBJECT | ARRAY | STRING | NUMBER))
    if beside:
        raise Fault(f"{beside[0]} together with enum or const is not supported", place)
    values = _values(schema, place)
    if not values:
        raise Fault("none of the values of enum or const has the type that is asked for", place)
    return values


def _values(schema: Schema, place: str) -> list[object]:
    """The values of enum and const that have the type asked for."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list) or not values:
        raise Fault(f"enum must be a list of at least one value, got {shown(values)}", place)
    if "const" in schema and "enum" in schema:
        const = canonical(schema["const"])
        values = [value for value in values if canonical(value) == const]
    types = types_of(schema, place) if "type" in schema else None
    return [value for value in values if types is None or _type(value) & types]


def _has_property(schema: object, name: str) -> bool:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return isinstance(properties, Mapping) and name in properties


def _type(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | Decimal):
        return {"number", "integer"} if is_whole(value) else {"number"}
    kinds: list[tuple[type, str]] = [(str, "string"), (list, "array"), (dict, "object")]
    return next(({name} for kind, name in kinds if isinstance(value, kind)), {"null"})


def _json(value: object, words: Mapping[str, str]) -> str:
    """A value as it is generated: without white space, letters as they are."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(_json(one, words) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key, words)}:{_json(one, words)}" for key, one in value.items()) + "}"
    text = json.dumps(value, ensure_ascii=False)
    return words.get(text, text)


def _bounds(schema: Schema, place: str) -> Bounds:
    found: dict[str, Decimal] = {}
    for name in sorted(NUMBER & schema.keys() - {"multipleOf"}):
        value = schema[name]
        bound = Decimal(value) if isinstance(value, int) else value
        if not isinstance(bound, Decimal) or abs(bound) > _MAX_BOUND or _places(bound) > 40:
            raise Fault(f"{name} {shown(value)} has more than 40 digits", place)
        found[name] = bound
    low, high = found.get("minimum"), found.get("maximum")
    above, below = found.get("exclusiveMinimum"), found.get("exclusiveMaximum")
    low_open = above is not None and (low is None or above >= low)
    high_open = below is not None and (high is None or below <= high)
    return Bounds(above if low_open else low, below if high_open else high, low_open, high_open)


def _places(value: Decimal) -> int:
    return max(0, -int(value.as_tuple().exponent))
