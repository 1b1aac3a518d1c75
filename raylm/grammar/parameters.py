"""The arguments of a call as a grammar, in the ways in which models write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from raylm.grammar.charset import CharSet
from raylm.grammar.ebnf import Chars, Expr, Rule, Rules, Text, alt, maybe, repeat, seq
from raylm.grammar.fault import Fault
from raylm.grammar.formats import FORMATS, UNCHECKED_FORMATS
from raylm.grammar.keywords import Schema, types_of
from raylm.grammar.regex import regex
from raylm.grammar.schema import JSON_WORDS, PYTHON_WORDS, SchemaGrammar, literals
from raylm.grammar.special import SpecialTokens
from raylm.grammar.until import text_until

_WORD = re.compile(r"\w+")
_GEMMA_STRING = "<escape>"
_MAX_NESTED = 16


class ParameterTags(msgspec.Struct, frozen=True):
    """Arguments in tags: `key_begin` KEY `key_end` `value_begin` VALUE `value_end`, with `between` between two. A
    string is written as it is, without any of `avoid`."""

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    between: str = ""
    avoid: tuple[str, ...] = ()


class Writing(NamedTuple):
    """How arguments are written; `tags` with the way "tags"."""

    way: Literal["json", "tags", "python", "gemma"]
    tags: ParameterTags | None
    special: SpecialTokens


class _Parameter(NamedTuple):
    name: str
    schema: object
    required: bool
    place: str


class Arguments:
    """The arguments of one tool. `write` is to be called once."""

    def __init__(self, schema: object, rules: Rules, prefix: str, writing: Writing) -> None:
        """`prefix` begins the names of its rules. Raises Fault."""
        self._schema = schema
        self._rules = rules
        self._prefix = prefix
        self._writing = writing
        words = PYTHON_WORDS if writing.way == "python" else JSON_WORDS
        self._grammar = SchemaGrammar(schema, rules, prefix=prefix, words=words)

    def write(self, end: Expr) -> Expr:
        """The arguments, then `end`. Raises Fault."""
        if self._writing.way == "json":
            return seq(self._grammar.value({"allOf": [self._schema, {"type": "object"}]}, "#"), end)
        parameters = self._parameters()
        if parameters is None:
            return self._any_members(end)
        for index in range(len(parameters), -1, -1):
            for is_first in (True, False):
                self._rules.add(self._state(index, is_first), self._rest(parameters, index, is_first, end))
        return Rule(self._state(0, True))

    def _state(self, index: int, is_first: bool) -> str:
        return f"{self._prefix}a{index}-{'first' if is_first else 'more'}"

    def _rest(self, parameters: list[_Parameter], index: int, is_first: bool, end: Expr) -> Expr:
        """What may follow when the first `index` parameters were passed by."""
        if index == len(parameters):
            # Never empty: a rule that is would be taken for one that begins with what follows it.
            return end
        one = parameters[index]
        member = seq(Text("" if is_first else self._between), self._member(one))
        options = [seq(member, Rule(self._state(index + 1, False)))]
        if not one.required:
            options.append(Rule(self._state(index + 1, is_first)))
        return alt(options)

    @property
    def _between(self) -> str:
        tags = self._writing.tags
        return {"python": ", ", "gemma": ","}.get(self._writing.way, tags.between if tags is not None else "")

    def _parameters(self) -> list[_Parameter] | None:
        """None where any are allowed."""
        flat = self._grammar.flat(self._schema, "#")
        if not isinstance(flat, Mapping) or "anyOf" in flat or "oneOf" in flat:
            raise Fault("parameters that are not simply an object with properties are not supported by this model", "#")
        named = flat.get("properties")
        required = flat.get("required", [])
        if named is None and not required and flat.get("additionalProperties") is not False:
            return None
        named = {} if named is None else named
        if not isinstance(named, Mapping) or not isinstance(required, list):
            raise Fault("properties must be an object, and required a list of names", "#")
        for keyword in ("minProperties", "maxProperties", "patternProperties", "propertyNames"):
            if keyword in flat:
                raise Fault(f"{keyword} of parameters is not supported by this model's format", "#")
        missing = {str(name): True for name in required if name not in named}
        found = [
            _Parameter(name, schema, name in required, f"#/properties/{name}")
            for name, schema in {**named, **missing}.items()
        ]
        for one in found:
            self._check_name(one)
        return found

    def _check_name(self, one: _Parameter) -> None:
        if not _WORD.fullmatch(one.name):
            raise Fault(
                f"a name of letters, digits and '_' is needed by this model's format, got {one.name!r}", one.place
            )

    def _member(self, one: _Parameter) -> Expr:
        way, mark = self._writing.way, self._writing.special.mark
        if way == "python":
            return seq(Text(f"{one.name}="), self._grammar.value(one.schema, one.place))
        if way == "gemma":
            return seq(Text(f"{one.name}:"), self._raw(one.schema, one.place, 0))
        tags = self._tags
        key = seq(mark(tags.key_begin), Text(one.name), mark(tags.key_end), mark(tags.value_begin))
        return seq(key, self._raw(one.schema, one.place, 0))

    @property
    def _tags(self) -> ParameterTags:
        assert self._writing.tags is not None, "the way is tags"
        return self._writing.tags

    def _raw(self, schema: object, place: str, depth: int) -> Expr:
        """A value with its end; a string as it is, without quotes."""
        if depth > _MAX_NESTED:
            raise Fault(f"the schema nests deeper than {_MAX_NESTED} levels", place)
        flat = self._grammar.flat(schema, place)
        if not isinstance(flat, Mapping):
            return self._text()
        for union in ("anyOf", "oneOf"):
            if union in flat:
                return self._union(flat, union, place, depth)
        if "enum" in flat or "const" in flat:
            return alt(self._literal(value) for value in literals(flat, place))
        types = types_of(flat, place)
        if "string" not in types:
            return self._not_string(flat, types, place)
        string = self._string(flat, place)
        others = types - {"string"}
        # A free string holds whatever the others are written as.
        if not others or string == self._text():
            return string
        return alt([string, self._not_string({**flat, "type": sorted(others)}, others, place)])

    def _union(self, flat: Schema, union: str, place: str, depth: int) -> Expr:
        options = flat[union]
        rest = {key: value for key, value in flat.items() if key != union}
        if not isinstance(options, list):
            raise Fault(f"{union} must be a list of schemas", place)
        found = [
            self._raw({"allOf": [one, rest]} if rest else one, f"{place}/{union}/{index}", depth + 1)
            for index, one in enumerate(options)
        ]
        return self._text() if self._text() in found else alt(found)

    def _literal(self, value: object) -> Expr:
        if isinstance(value, str):
            return self._ended(Text(value)) if value else self._ended(seq())
        return self._closed(self._grammar.value({"const": value}, "#"))

    def _not_string(self, flat: Schema, types: frozenset[str], place: str) -> Expr:
        if self._writing.way == "gemma" and types & {"object", "array"}:
            raise Fault("objects and arrays are not supported by this model's format", place)
        return self._closed(self._grammar.value(flat, place))

    def _string(self, flat: Schema, place: str) -> Expr:
        """A string as it is."""
        pattern, format_ = flat.get("pattern"), flat.get("format")
        format_ = None if format_ in UNCHECKED_FORMATS else format_
        if "minLength" in flat or "maxLength" in flat:
            raise Fault("minLength and maxLength of a parameter are not supported by this model's format", place)
        if pattern is not None and format_ is not None:
            raise Fault("pattern together with format is not supported by this model's format", place)
        if pattern is None and format_ is None:
            return self._text()
        if format_ is not None and format_ not in FORMATS:
            raise Fault(f"the format {format_!r:.100} is not supported", place)
        source = str(pattern) if format_ is None else FORMATS[str(format_)]
        return self._ended(regex(source, in_json=False))

    def _text(self) -> Expr:
        """Any string with its end."""
        special = self._writing.special
        if self._writing.way == "gemma":
            return seq(special.mark(_GEMMA_STRING), text_until(self._rules, "text", _GEMMA_STRING, special))
        return text_until(self._rules, "text", self._tags.value_end, special, self._tags.avoid)

    def _ended(self, text: Expr) -> Expr:
        """A string's text with what stands around it."""
        mark = self._writing.special.mark
        if self._writing.way == "gemma":
            return seq(mark(_GEMMA_STRING), text, mark(_GEMMA_STRING))
        return seq(text, mark(self._tags.value_end))

    def _closed(self, value: Expr) -> Expr:
        """What is no string, with its end."""
        return value if self._writing.way == "gemma" else seq(value, self._writing.special.mark(self._tags.value_end))

    def _any_members(self, end: Expr) -> Expr:
        """Any arguments."""
        letters = CharSet.of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
        key = repeat(Chars(letters), 1, 64)
        way, mark = self._writing.way, self._writing.special.mark
        if way == "python":
            member = seq(key, Text("="), self._grammar.value(True, "#"))
        elif way == "gemma":
            scalar = {"type": ["number", "boolean", "null"]}
            member = seq(key, Text(":"), alt([self._text(), self._grammar.value(scalar, "#")]))
        else:
            tags = self._tags
            member = seq(mark(tags.key_begin), key, mark(tags.key_end), mark(tags.value_begin), self._text())
        one = self._rules.add(f"{self._prefix}member", member)
        return seq(maybe(seq(one, repeat(seq(Text(self._between), one), 0, None))), end)
