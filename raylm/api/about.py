"""What the OpenAPI document and docs/fields.md say of an operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from raylm.api.unsupported import Fields

CALLED: frozenset[int] = frozenset({400, 413, 500})
"""What any call with a body may be answered with, when it fails."""
ON_MODEL = CALLED | {404, 503}
"""One that names a model."""
GENERATING = ON_MODEL | {429, 504}
"""One that asks an engine; 429 where a tenant has limits."""


class About(NamedTuple):
    """summary: one line. tag: the group in which it is shown.

    requests: what its body may be; empty: it has none. answer: the type of its JSON, a msgspec Struct or a list of
    one; None: an object of no fixed form, as is the text of `media`. event: what each event of a stream holds; None: it
    does not stream. errors: the statuses of its errors, beside those that keys give. query: its parameters in the
    URL's query, and what they mean. refused: fields that are refused by name, with the values that pass. ignored:
    fields that are taken without effect, and why. error: what its errors hold, where that is not its dialect's.
    """

    summary: str
    tag: str
    requests: tuple[type[BaseModel], ...] = ()
    answer: Any = None
    event: type | None = None
    errors: frozenset[int] = frozenset()
    query: Mapping[str, str] = {}
    refused: Fields = {}
    ignored: Mapping[str, str] = {}
    media: str = "application/json"
    error: type | None = None
