"""Values that formats do not write as JSON: typed by the tool's schema, or by Python's literals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from raylm.generation.parsing.json_text import decoded, dumps
from raylm.generation.parsing.sink import Sink

Schema = Mapping[str, object]
_MOST_SCHEMAS = 256
_UNIONS = ("anyOf", "oneOf", "allOf")
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
# Python's names, which tools' schemas often have.
_OTHER_NAMES = {
    "int": "integer", "float": "number", "bool": "boolean", "str": "string", "dict": "object", "list": "array",
}  # fmt: skip
_INTEGER = re.compile(r"[-+]?\d{1,4000}(?:\.0+)?")


class Members:
    """Writes a call's arguments as a JSON object, a member at a time."""

    __slots__ = ("_any", "_sink", "_tool")

    def __init__(self, sink: Sink, name: str, tools: Mapping[str, Schema]) -> None:
        """The call begins by this."""
        sink.begin(name)
        self._sink = sink
        self._tool = tools.get(name)
        self._any = False

    def declares(self, key: str) -> bool:
        """Whether the tool has such a parameter."""
        return bool(_parameter(self._tool, key))

    def typed(self, key: str, text: str, *, json_first: bool) -> None:
        """A value as text."""
        self.put(key, typed(text, types_of(self._tool, key), json_first=json_first))

    def literal(self, key: str, value: str) -> None:
        """A value as JSON text. A string becomes what the schema says, where that is no string."""
        kinds = types_of(self._tool, key)
        said = decoded(value) if value.startswith('"') and kinds and "string" not in kinds else None
        self.put(key, typed(said, kinds, json_first=False) if isinstance(said, str) else value)

    def put(self, key: str, value: str) -> None:
        self._sink.arguments(f"{', ' if self._any else '{'}{dumps(key)}: {value}")
        self._any = True

    def broken_off(self, key: str, text: str) -> None:
        """The output ended within this value: the arguments stay open."""
        self.put(key, dumps(text)[:-1])

    def close(self) -> None:
        self._sink.arguments("}" if self._any else "{}")


def types_of(tool: Schema | None, key: str) -> frozenset[str]:
    """The types of JSON that a tool's schema allows for a parameter; empty when it does not say."""
    parameter = _parameter(tool, key)
    return frozenset(_types(parameter, tool or {})) if parameter else frozenset()


def typed(text: str, types: frozenset[str], *, json_first: bool) -> str:
    """A value written as plain text, as JSON text: of the first type that it can be, a string where it can be no other.

    With `json_first`, JSON is read where no type is known; without it, only an object or array.
    """
    value = _as_typed(text.strip(), types, json_first)
    if value is not None:
        try:
            return dumps(value)
        except ValueError:
            return dumps(text)
    null = text.strip() in ("null", "None") and (json_first if not types else "null" in types or "string" not in types)
    return "null" if null else dumps(text)


def _as_typed(text: str, types: frozenset[str], json_first: bool) -> object:
    """The value that a text is by the types; None where it is a string or null."""
    if types == {"string"}:
        return None
    value = decoded(text)
    if not types:
        return value if json_first or isinstance(value, dict | list) else None
    if "integer" in types and _INTEGER.fullmatch(text):
        return int(text.partition(".")[0])
    if "number" in types and isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if types & {"object", "array"}:
        value = decoded(python_json(text) or "") if value is None else value
        if ("object" in types and isinstance(value, dict)) or ("array" in types and isinstance(value, list)):
            return value
    return None


def _parameter(tool: Schema | None, key: str) -> Schema | None:
    properties = tool.get("properties") if tool else None
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _types(parameter: Schema, root: Schema) -> Iterator[str]:
    """The types of a schema and of those that it is made of, each looked at once."""
    waiting: list[object] = [parameter]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_SCHEMAS:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        named = schema.get("type")
        kinds = (named,) if isinstance(named, str) else named if isinstance(named, list) else ()
        yield from (_OTHER_NAMES.get(kind, kind) for kind in kinds if isinstance(kind, str))
        enum = schema.get("enum")
        values = enum[:_MOST_SCHEMAS] if isinstance(enum, list) else []
        for value in [*values, *([schema["const"]] if "const" in schema else ())]:
            yield "null" if value is None else _TYPES.get(type(value), "string")
        if named is None and "properties" in schema:
            yield "object"
        for union in _UNIONS:
            choices = schema.get(union)
            waiting += choices[:_MOST_SCHEMAS] if isinstance(choices, list) else ()
        waiting.append(_referred(schema.get("$ref"), root))


def _referred(reference: object, root: Schema) -> object:
    """What a reference within the tool's schema names."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for step in reference[2:].split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<punctuation>[\[\]{}(),:])|[uU]?(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"|(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<word>[A-Za-z]+)",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\\": "\\", "'": "'",
    '"': '"', "\n": "", "/": "/",
}  # fmt: skip
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS = {"(": "[", ")": "]"}


def python_json(text: str) -> str | None:
    """A literal of Python as JSON text; None when it is none. Names of JSON's constants pass too."""
    tokens: list[str] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        token = _json_token(found) if found else None
        if found is None or token is None:
            return None
        at = found.end()
        if token == ":" and tokens and tokens[-1][0] not in '"}]':
            tokens[-1] = f'"{tokens[-1]}"'
        if token in ("]", "}") and tokens and tokens[-1] == ",":
            tokens.pop()
        if token:
            tokens.append(token)
    if tokens == ["null"]:
        return "null"
    value = decoded(" ".join(tokens))
    try:
        return None if value is None else dumps(value)
    except ValueError:
        return None


def _json_token(found: re.Match[str]) -> str | None:
    text = found.group()
    match found.lastgroup:
        case "space":
            return ""
        case "punctuation":
            return _BRACKETS.get(text, text)
        case "string":
            return dumps(_ESCAPE.sub(_unescaped, found["string"][1:-1]))
        case "number":
            number = text.replace("_", "")
            value = float(number) if set(number) & set(".eE") else int(number) if len(number) < 4000 else math.inf
            return dumps(value) if math.isfinite(value) else None
        case _:
            return _WORDS.get(text)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is None:
        return _ESCAPED.get(found[4], found[0])
    number = int(code, 16)
    return chr(number) if number <= 0x10FFFF else found[0]
