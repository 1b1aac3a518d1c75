"""From the bytes of a body to its JSON values, within the limits of HttpConfig.

Nothing here holds Python's lock for more than some 20 ms, whatever a body of 8 MiB holds: limits come before reading,
and lists of token ids, which may be long, are read in pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from pydantic_core import from_json

from raylm.api.outline import TooManyValues, check_outline
from raylm.config.serving import HttpConfig
from raylm.errors import RequestRejected

_PIECE_BYTES = 128 * 1024
_MAX_LISTS = 65_536
"""A body with more brackets is not looked through for prompts: brackets take longer than numbers."""


class JsonBody(NamedTuple):
    """A body's fields. `rest` is the JSON that they were read from, without token ids that were read apart."""

    fields: object
    rest: bytes | bytearray


def read_json(body: bytes | bytearray, limits: HttpConfig, *, ids_field: str = "prompt") -> JsonBody:
    """`ids_field` may hold many token ids. Raises RequestRejected when the body is no JSON, or holds more than is
    allowed."""
    _check_utf8(body)
    max_values, max_depth = limits.max_json_values, limits.max_json_depth
    try:
        check_outline(body, max_values=max_values, max_depth=max_depth)
    except TooManyValues:
        ids, rest = _token_ids(body, ids_field)
        if ids is None:
            raise
        try:
            check_outline(rest, max_values=max_values, max_depth=max_depth)
        except TooManyValues as error:
            raise TooManyValues(f"{error} beside the token ids of {ids_field}", code=error.code) from None
        fields = _from_json(rest)
        numbers = _read_token_ids(ids, ids_field, limits.max_choices)
        if not isinstance(fields, dict) or ids_field not in fields:
            raise
        return JsonBody({**fields, ids_field: numbers}, rest)
    return JsonBody(_from_json(body), body)


def _check_utf8(body: bytes | bytearray) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestRejected(f"The body is not valid UTF-8 at byte {error.start}", code="invalid_utf8") from None


def _from_json(body: bytes | bytearray) -> object:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestRejected(f"The body is not valid JSON: {error}", code="invalid_json") from None


class _Prompt(msgspec.Struct):
    """A body of which only the place of `prompt` counts."""

    ids: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="prompt")


class _Tokens(msgspec.Struct):
    """A body of which only the place of `tokens` counts."""

    ids: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="tokens")


_IDS: dict[str, type[_Prompt | _Tokens]] = {"prompt": _Prompt, "tokens": _Tokens}


def _token_ids(body: bytes | bytearray, field: str) -> tuple[bytes | None, bytes]:
    """The JSON of `field` where it is made of numbers, and the body with null in its place."""
    if body.count(b"[") > _MAX_LISTS:
        return None, b""
    try:
        prompt = bytes(msgspec.json.decode(body, type=_IDS[field]).ids)
    except (msgspec.DecodeError, RecursionError):
        return None, b""
    if not prompt.startswith(b"[") or b'"' in prompt or b"{" in prompt:
        return None, b""
    # The last of equal texts: with a field given twice the last one counts. Where the same text stands in another field
    # behind it, the prompt stays in the rest, which then holds too many values.
    start = body.rindex(prompt)
    return prompt, bytes(body[:start]) + b"null" + bytes(body[start + len(prompt) :])


def _read_token_ids(ids: bytes, field: str, max_lists: int) -> list[object]:
    """A list of numbers, or a list of such lists."""
    if not ids[1:].lstrip().startswith(b"["):
        return _read_numbers(ids, field)
    if (count := ids.count(b"[") - 1) > max_lists:
        message = f"{field} holds {count} lists, at most {max_lists} are allowed (completions of a request)"
        raise RequestRejected(message, param=field)
    try:
        lists = msgspec.json.decode(ids, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise RequestRejected(f"The body is not valid JSON: {error}", code="invalid_json") from None
    return [_read_numbers(bytes(one), f"{field}[{index}]") for index, one in enumerate(lists)]


def _read_numbers(json: bytes, place: str) -> list[object]:
    """A list of numbers, read in pieces: one piece holds the lock for a few milliseconds."""
    inner = json[1:-1]
    if not json.startswith(b"[") or b"[" in inner:
        raise RequestRejected(f"{place} must be a list of token ids, or a list of those", param=place)
    numbers: list[object] = []
    start = 0
    while start < len(inner):
        end = inner.find(b",", start + _PIECE_BYTES)
        end = len(inner) if end < 0 else end
        piece = _from_json(b"[" + inner[start:end] + b"]")
        assert isinstance(piece, list), "JSON in brackets is a list"
        numbers += piece
        start = end + 1
    return numbers
