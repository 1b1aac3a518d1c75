"""Pages of input items, and what else stands in the queries of responses' URLs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from raylm.api.responses.wire import Item, encode
from raylm.errors import RequestRejected
from raylm.generation.quote import quote

_DEFAULT = 20
_MOST = 100


class ItemPage(msgspec.Struct):
    """Items, and the ids of the first and last of them."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    kind: str = msgspec.field(default="list", name="object")


def page(items: Sequence[Item], query: Mapping[str, str]) -> bytes:
    """OpenAI's list of items, as `limit`, `order` and `after` of the URL ask for. Raises RequestRejected."""
    limit = integer(query, "limit", _DEFAULT, 1, _MOST)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestRejected(f"order must be asc or desc, got {quote(order)}", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise RequestRejected(f"after must be the id of one of the items, got {quote(after)}", param="after")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return encode(ItemPage(shown, first, last, len(ordered) > limit))


def integer(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """An integer of a URL's query. Raises RequestRejected."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and least <= int(text) <= most):
        raise RequestRejected(f"{name} must be an integer from {least} to {most}, got {quote(text)}", param=name)
    return int(text)


def flag(query: Mapping[str, str], name: str) -> bool:
    """Whether a URL's query asks for something; not given, it does not. Raises RequestRejected."""
    text = query.get(name, "false")
    if text not in ("true", "false", "1", "0"):
        raise RequestRejected(f"{name} must be true or false, got {quote(text)}", param=name)
    return text in ("true", "1")
