"""The arguments of a tool's call as an object, for APIs that send no JSON text."""

from __future__ import annotations

import msgspec
from pydantic_core import from_json


def as_object(arguments: str) -> msgspec.Raw:
    """The JSON of an object. Arguments that a length limit has cut are closed where they end; what is no object at all
    becomes an empty one."""
    try:
        # Values stay the bytes that they are: numbers of any length too.
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(arguments or "{}", type=dict[str, msgspec.Raw])))
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        given = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        given = {}
    return msgspec.Raw(msgspec.json.encode(given if isinstance(given, dict) else {}))
