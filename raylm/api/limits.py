"""How much of a thing one request may hold, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping

from raylm.config.serving import HttpConfig
from raylm.errors import RequestRejected

_STOP_FIELDS = ("stop", "stop_sequences")
"""OpenAI's and Anthropic's."""


def check_counts(fields: Mapping[str, object], limits: HttpConfig) -> None:
    """Refuse a body that holds too much. Raises RequestRejected with the field, the number and the limit; types are
    for others to check."""
    _check("The body", "fields", len(fields), limits.max_fields, None)
    messages = fields.get("messages")
    if isinstance(messages, list):
        _check("messages", "messages", len(messages), limits.max_messages, "messages")
        parts = sum(map(_num_parts, messages))
        _check("messages", "content parts in all", parts, limits.max_content_parts, "messages")
    for field in _STOP_FIELDS:
        check_stops(fields.get(field), field, limits)
    stop_token_ids = fields.get("stop_token_ids")
    if isinstance(stop_token_ids, list):
        _check("stop_token_ids", "entries", len(stop_token_ids), limits.max_stop_token_ids, "stop_token_ids")


def check_stops(stop: object, field: str, limits: HttpConfig) -> None:
    """Refuse stop strings that are too long. `field` is where they came from."""
    for number, one in enumerate(stop if isinstance(stop, list) else [stop]):
        if isinstance(one, str):
            place = f"{field}[{number}]" if isinstance(stop, list) else field
            _check(place, "characters", len(one), limits.max_stop_chars, field)


def _num_parts(message: object) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    return len(content) if isinstance(content, list) else 0


def _check(place: str, things: str, count: int, limit: int, param: str | None) -> None:
    if count > limit:
        raise RequestRejected(f"{place} has {count} {things}, at most {limit} are allowed", param=param)
