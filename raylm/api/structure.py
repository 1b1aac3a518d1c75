"""The ways in which OpenAI's, vLLM's and SGLang's clients ask for structured output."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected
from raylm.generation.quote import quote

_MAX_NAME_CHARS = 64
_MAX_SHOWN_CHARS = 64
_FORMAT_KEYS: Mapping[str, frozenset[str]] = {
    "text": frozenset(),
    "json_object": frozenset({"schema"}),
    "json_schema": frozenset({"json_schema"}),
    "structural_tag": frozenset({"format", "structures", "triggers"}),
}
"""The types of response_format, and the keys that each may have beside its type."""
_SCHEMA_KEYS = frozenset({"name", "schema", "strict", "description"})
GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields, and the kinds that they ask for."""
PLAIN = {"json_schema": "json_schema", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""SGLang's fields, each a string of the kind."""
STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
"""The fields of vLLM's structured_outputs that ask for something."""
STRUCTURED_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False, True),
    "disable_fallback": (None, True, False),
    "whitespace_pattern": (None,),
}
"""Its other fields, and the values of each that change nothing here: white space is short in any case, objects have no
properties but those that the schema names or allows, and there is no other backend to fall back to."""
FIELDS = ("response_format", "structured_outputs", *GUIDED, *PLAIN)
"""Fields of a request; at most one of them may ask for something."""


class Asked:
    """A structure, and the field of the request that it came from, for what is wrong with it."""

    __slots__ = ("param", "structure")

    def __init__(self, structure: StructuredOutput, param: str) -> None:
        self.structure = structure
        self.param = param


def structure_of(request: object) -> Asked | None:
    """What a request asks for in any of FIELDS, which are its attributes; None where it asks for nothing.

    Raises RequestRejected where a field is no structure, or several ask.
    """
    found: list[Asked] = []
    for field in FIELDS:
        value = getattr(request, field)
        asked = None if value is None else _READERS.get(field, _plain)(field, value)
        if asked is not None:
            found.append(asked)
    if len(found) > 1:
        raise RequestRejected(
            f"{found[1].param} is given together with {found[0].param}; an answer has one structure",
            param=found[1].param,
        )
    return found[0] if found else None


def read_format(field: str, value: object) -> Asked | None:
    """OpenAI's: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {...}};
    llama.cpp's and Together's: {"type": "json_object", "schema": {...}}; vLLM's and SGLang's:
    {"type": "structural_tag", ...}. Raises RequestRejected."""
    if not isinstance(value, dict):
        raise RequestRejected(f"{field} must be an object, got {quote(value)}", param=field)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise RequestRejected(
            f"{field}.type must be text, json_object, json_schema or structural_tag, got {quote(kind)}",
            param=f"{field}.type",
        )
    _check_keys(value, _FORMAT_KEYS[kind] | {"type"}, field, f" with type {kind}")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return _asked(kind, "", field) if schema is None else _schema(schema, f"{field}.schema")
    if kind == "json_schema":
        return _named_schema(value.get("json_schema"), f"{field}.json_schema")
    return _asked(kind, json.dumps(value, ensure_ascii=False), field)


def _check_keys(value: Mapping[str, object], allowed: AbstractSet[str], field: str, where: str = "") -> None:
    """Raises RequestRejected for a key that is not allowed; null says nothing."""
    for key, one in value.items():
        if key not in allowed and one is not None:
            name = f"{field}.{key:.{_MAX_SHOWN_CHARS}}"
            raise RequestRejected(
                f"{name} is not supported{where}, got {quote(one)}", param=name, code="unsupported_parameter"
            )


def _schema(value: object, field: str) -> Asked:
    if not isinstance(value, dict | bool):
        raise RequestRejected(f"{field} must be a JSON schema, got {quote(value)}", param=field)
    return _asked("json_schema", json.dumps(value, ensure_ascii=False), field)


def _named_schema(value: object, field: str) -> Asked:
    """{"name": ..., "schema": {...}, "strict": ...}. The schema is kept to, strict or not."""
    if not isinstance(value, dict):
        raise RequestRejected(f"{field} must be an object with name and schema, got {quote(value)}", param=field)
    _check_keys(value, _SCHEMA_KEYS, field)
    name = value.get("name")
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS):
        raise RequestRejected(
            f"{field}.name must be a string of 1 to {_MAX_NAME_CHARS} characters, got {quote(name)}",
            param=f"{field}.name",
        )
    for key, types in (("description", str), ("strict", bool)):
        if value.get(key) is not None and not isinstance(value[key], types):
            raise RequestRejected(f"{field}.{key} must be a {types.__name__}, got {quote(value[key])}", param=field)
    return _schema(value.get("schema"), f"{field}.schema")


def _structured_outputs(field: str, value: object) -> Asked | None:
    """vLLM's: an object with one of STRUCTURED."""
    if not isinstance(value, dict):
        raise RequestRejected(f"{field} must be an object, got {quote(value)}", param=field)
    for name, one in value.items():
        if name not in STRUCTURED and one not in STRUCTURED_NEUTRAL.get(name, (None,)):
            raise RequestRejected(
                f"{field}.{name} is not supported, got {quote(one)}",
                param=f"{field}.{name}",
                code="unsupported_parameter",
            )
    given = [name for name in STRUCTURED if value.get(name) not in (None, False)]
    if len(given) > 1:
        raise RequestRejected(f"{field} has both {given[0]} and {given[1]}; one is allowed", param=field)
    if not given:
        return None
    name = given[0]
    return _of_kind(STRUCTURED[name], value[name], f"{field}.{name}")


def _guided(field: str, value: object) -> Asked:
    return _of_kind(GUIDED[field], value, field)


def _plain(field: str, value: object) -> Asked:
    return _of_kind(PLAIN[field], value, field)


def _of_kind(kind: str, value: object, field: str) -> Asked:
    if kind == "json_object":
        if value is not True:
            raise RequestRejected(f"{field} must be true or false, got {quote(value)}", param=field)
        return _asked(kind, "", field)
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise RequestRejected(f"{field} must be a list of strings, got {quote(value)}", param=field)
        return _asked(kind, json.dumps(value, ensure_ascii=False), field)
    if kind in ("json_schema", "structural_tag") and isinstance(value, dict):
        return _asked(kind, json.dumps(value, ensure_ascii=False), field)
    if not isinstance(value, str):
        allowed = "an object or its JSON" if kind in ("json_schema", "structural_tag") else "a string"
        raise RequestRejected(f"{field} must be {allowed}, got {quote(value)}", param=field)
    return _asked(kind, value, field)


def _asked(kind: str, value: str, field: str) -> Asked:
    try:
        return Asked(StructuredOutput(kind, value), field)
    except RequestRejected as error:
        message = str(error).replace("structure.value", field)
        raise RequestRejected(message, param=field) from None


_READERS: Mapping[str, Callable[[str, object], Asked | None]] = {
    "response_format": read_format,
    "structured_outputs": _structured_outputs,
    **dict.fromkeys(GUIDED, _guided),
}
