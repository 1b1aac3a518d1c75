"""From the text of a choice to its pieces: what is said, thought and called."""

from __future__ import annotations

from typing import Protocol

from raylm.generation.choices import ChoiceDelta
from raylm.generation.pieces import CallBegin, Piece, Reasoning


class PieceReader(Protocol):
    """Text of one choice in, pieces out."""

    @property
    def in_reasoning(self) -> bool:
        """What comes next belongs to the reasoning, as far as is known."""
        ...

    def push(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]:
        """What was held back."""
        ...


class Reading(Protocol):
    """How the choices of one request are read."""

    def begin(self) -> PieceReader:
        """What reads one of them."""
        ...


class ChoiceReader:
    """Reads one choice."""

    def __init__(self, reading: Reading) -> None:
        self._pieces = reading.begin()
        self._has_calls = False

    def pieces(self, text: str, finish_reason: str | None) -> tuple[list[Piece], str | None]:
        """The pieces of a text, and the reason why the choice has ended: after a call it is "tool_calls" where it ended
        by itself."""
        pieces = self._pieces.push(text)
        if finish_reason is not None:
            pieces += self._pieces.finish()
        self._has_calls = self._has_calls or any(isinstance(piece, CallBegin) for piece in pieces)
        return pieces, "tool_calls" if finish_reason == "stop" and self._has_calls else finish_reason

    def read(self, delta: ChoiceDelta) -> ChoiceDelta:
        """The delta with its pieces."""
        was_reasoning = self._pieces.in_reasoning
        pieces, reason = self.pieces(delta.text, delta.finish_reason)
        num_reasoning = delta.num_tokens
        if not (was_reasoning and self._pieces.in_reasoning):
            num_reasoning = _share(delta, sum(len(piece.text) for piece in pieces if isinstance(piece, Reasoning)))
        return delta._replace(pieces=tuple(pieces), finish_reason=reason, num_reasoning=num_reasoning)


def _share(delta: ChoiceDelta, num_chars: int) -> int:
    """How many of a delta's tokens so many characters of its text are, about: where reasoning begins or ends in it.
    A delta has many tokens where its reader was behind."""
    if delta.num_tokens < 2 or not num_chars:
        return 0
    return min(delta.num_tokens, round(delta.num_tokens * num_chars / max(1, len(delta.text))))
