"""From the text of a choice to its pieces: what is said, thought and called."""

from __future__ import annotations

from typing import Protocol

from raylm.generation.choices import ChoiceDelta
from raylm.generation.pieces import CallBegin, Piece


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

    def __init__(self, pieces: PieceReader) -> None:
        self._pieces = pieces
        self._has_calls = False

    def read(self, delta: ChoiceDelta) -> ChoiceDelta:
        """The delta with its pieces. A choice that ends by itself after a call has the finish reason "tool_calls"."""
        reader = self._pieces
        was_reasoning = reader.in_reasoning
        pieces = reader.push(delta.text)
        reason = delta.finish_reason
        if reason is not None:
            pieces += reader.finish()
        if any(isinstance(piece, CallBegin) for piece in pieces):
            self._has_calls = True
        if reason == "stop" and self._has_calls:
            reason = "tool_calls"
        num_reasoning = delta.num_tokens if was_reasoning and reader.in_reasoning else 0
        return delta._replace(pieces=tuple(pieces), finish_reason=reason, num_reasoning=num_reasoning)
