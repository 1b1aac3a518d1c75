"""What shows that an answer is streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_ATTEMPTS = 5


def in_pieces(ask: Callable[[], list[T]]) -> list[T]:
    """The pieces of a stream, which are more than three. Tokens that were made while the server was held, as on a busy
    machine, come together: such a stream is asked for again."""
    for _ in range(_ATTEMPTS):
        pieces = ask()
        if len(pieces) > 3:
            return pieces
    raise AssertionError(f"{_ATTEMPTS} streams came in three pieces at most, the last one in {len(pieces)}")
