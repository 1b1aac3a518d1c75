"""Which of the fields that decide what a body is stand in it, before the body is read."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

_Field = msgspec.Raw | msgspec.UnsetType


class _Fields(msgspec.Struct):
    """All other fields are passed over without making anything of them."""

    messages: _Field = msgspec.UNSET
    prompt: _Field = msgspec.UNSET
    input: _Field = msgspec.UNSET
    return_token_strs: _Field = msgspec.UNSET


class Peek(NamedTuple):
    """Which fields a body has, and one's value."""

    has_messages: bool = False
    has_prompt: bool = False
    has_input: bool = False
    wants_token_strs: bool = False


def peek(body: bytes | bytearray) -> Peek:
    """What is no JSON object seems empty: who reads it says what is wrong."""
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, RecursionError):
        return Peek()
    # Nothing of the fields is kept: they hold on to the body, which is to be emptied.
    return Peek(
        fields.messages is not msgspec.UNSET,
        fields.prompt is not msgspec.UNSET,
        fields.input is not msgspec.UNSET,
        isinstance(fields.return_token_strs, msgspec.Raw) and bytes(fields.return_token_strs) == b"true",
    )
