"""Values of a request, as a message quotes them."""

from __future__ import annotations

import json

MAX_VALUE_CHARS = 100
"""How much of a wrong value a message quotes."""


def quote(value: object) -> str:
    """A value as JSON, cut where it gets long; no more of it is looked at than is quoted."""
    text = json.dumps(_Clip(MAX_VALUE_CHARS + 1).of(value), ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."


class _Clip:
    """The beginning of a JSON value, at least `room` characters of it if there are as many."""

    def __init__(self, room: int) -> None:
        self._room = room

    def of(self, value: object) -> object:
        if isinstance(value, str):
            kept = value[: max(self._room, 0)]
            self._room -= len(kept)
            return kept
        # Whatever else it is, and each element of it, writes a character at least.
        self._room -= 1
        if isinstance(value, list):
            items: list[object] = []
            for item in value:
                if self._room <= 0:
                    break
                items.append(self.of(item))
                self._room -= 1
            return items
        if isinstance(value, dict):
            members: dict[object, object] = {}
            for name, member in value.items():
                if self._room <= 0:
                    break
                shown = self.of(name)  # First, so that a long member leaves its name whole.
                members[shown] = self.of(member)
            return members
        return value
