"""From the bytes of a body to a checked request; whatever is wrong becomes one sentence that names the field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Set as AbstractSet
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from raylm.api.body import read_json
from raylm.api.limits import check_counts
from raylm.api.protocol import ChatRequest, GenerationRequest, StreamOptions
from raylm.api.unsupported import (
    CHAT_ONLY,
    COMPLETIONS_ONLY,
    HARMLESS,
    STREAM_OPTIONS,
    UNSUPPORTED,
    refuse_unsupported,
)
from raylm.config.serving import HttpConfig
from raylm.errors import RequestRejected
from raylm.generation.quote import MAX_VALUE_CHARS, quote

Request = TypeVar("Request", bound=GenerationRequest)
Checked = TypeVar("Checked", bound=BaseModel)


def parse(cls: type[Request], body: bytes | bytearray, limits: HttpConfig) -> Request:
    """Check a body, and empty it. Raises RequestRejected; if `limits.strict` also for unknown fields and for a field
    given twice."""
    own = CHAT_ONLY if issubclass(cls, ChatRequest) else COMPLETIONS_ONLY
    data = read_fields(body, limits, cls.model_fields.keys() | UNSUPPORTED.keys() | own.keys() | HARMLESS.keys())
    options = data.get("stream_options")
    if limits.strict and isinstance(options, dict):
        check_names(options, StreamOptions.model_fields.keys() | STREAM_OPTIONS.keys(), "stream_options.")
    refuse_unsupported(data, chat=issubclass(cls, ChatRequest))
    return validated(cls, data)


def parse_plain(
    cls: type[Checked], body: bytes | bytearray, limits: HttpConfig, *, ids_field: str = "prompt"
) -> Checked:
    """The same for a body that asks for no tokens: it has the fields of `cls`."""
    return validated(cls, read_fields(body, limits, cls.model_fields.keys(), ids_field=ids_field))


def read_fields(
    body: bytes | bytearray, limits: HttpConfig, known: AbstractSet[str], *, ids_field: str = "prompt"
) -> dict[str, object]:
    """The fields of a body, which is emptied; `ids_field` may hold many token ids. Raises RequestRejected where the
    body is no JSON object or holds too much; if `limits.strict` also for fields that are not `known` and for a field
    given twice."""
    data, rest = read_json(body, limits, ids_field=ids_field)
    if isinstance(body, bytearray) and rest is not body:
        body.clear()
    if not isinstance(data, dict):
        raise RequestRejected(f"The body must be a JSON object, got {quote(data)}", code="invalid_json")
    check_counts(data, limits)
    if limits.strict:
        check_names(data, known)
        json.loads(rest, object_pairs_hook=_without_duplicates)
    if isinstance(rest, bytearray):
        rest.clear()
    return data


def validated(cls: type[Checked], data: dict[str, object]) -> Checked:
    """The fields with their types checked. Raises RequestRejected."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_context=False)[0]) from None


def prompts_of(prompt: object) -> list[str | list[int]]:
    """The prompts of /v1/completions: a string, a list of token ids, or a list of those. Raises RequestRejected."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return [_prompt(one, f"prompt[{index}]") for index, one in enumerate(prompt)]
    return [_prompt(prompt, "prompt")]


def _prompt(value: object, place: str) -> str | list[int]:
    if not isinstance(value, str | list):
        reason = f"must be a string or a list of token ids, or prompt a list of those, got {quote(value)}"
    elif not value:
        reason = f"must not be empty, got {quote(value)}"
    elif isinstance(value, str) or all(type(token) is int for token in value):
        return value
    else:
        index, token = next((index, token) for index, token in enumerate(value) if type(token) is not int)
        reason = f"must hold token ids, but [{index}] is {quote(token)}"
    raise RequestRejected(f"{place} {reason}", param=place)


def check_names(given: dict[str, object], known: AbstractSet[str], place: str = "") -> None:
    """Raises RequestRejected for a field that is not `known`; `place` stands before its name."""
    for name in given:
        if name not in known:
            name = (place + name)[:MAX_VALUE_CHARS]
            raise RequestRejected(f"Field {quote(name)} is unknown", param=name, code="unknown_field")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0][:MAX_VALUE_CHARS]
        raise RequestRejected(f"Field {quote(twice)} is given twice", param=twice, code="duplicate_field")
    return found


def _explain(item: ErrorDetails) -> RequestRejected:
    """pydantic's first finding as a sentence."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
    place = place.removeprefix(".")
    if item["type"] == "missing":
        return RequestRejected(f"{place} is required", param=place, code="missing_field")
    return RequestRejected(f"{place} {_reason(item)}, got {quote(item['input'])}", param=place)


def _reason(item: ErrorDetails) -> str:
    """pydantic's message in the words of JSON, to stand after the field's name."""
    if item["type"] == "model_type":
        return "must be an object"
    message = item["msg"].removeprefix("Value error, ").replace("a valid integer", "an integer")
    return message.replace("Input should be", "must be").replace("a valid ", "a ")
