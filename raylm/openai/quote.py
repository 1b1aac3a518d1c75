"""Values of a request, as a message quotes them."""

from __future__ import annotations

import json

MAX_VALUE_CHARS = 100
"""How much of a wrong value a message quotes."""


def quote(value: object) -> str:
    """A value as JSON, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."
