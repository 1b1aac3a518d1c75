"""Where readers put pieces, and the ids of calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Literal

from raylm.generation.pieces import CallArguments, CallBegin, Piece, Reasoning, Text

IdStyle = Literal["call", "mistral", "kimi"]
_ALPHANUMERIC = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def call_id(style: IdStyle, name: str, index: int) -> str:
    """A new id: call_ and 24 hexadecimal digits, Mistral's 9 letters and digits, or Kimi's functions.NAME:INDEX."""
    if style == "kimi":
        return f"functions.{name}:{index}"
    if style == "mistral":
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class Sink:
    """Pieces since the last `drain`; neighbours of one kind become one piece.

    With `trims`, white space between calls and after the last one goes, and newlines between a text and a call: these
    belong to the formats. All other white space stays, except with `strips` that between a text and a call.
    """

    __slots__ = ("_bits", "_ids", "_index", "_kind", "_out", "_said", "_space", "_strips", "_trims")

    def __init__(self, ids: IdStyle, *, trims: bool, strips: bool) -> None:
        self._ids = ids
        self._trims = trims
        self._strips = strips
        self._out: list[Piece] = []
        self._bits: list[str] = []
        self._kind: Callable[[str], Piece] | None = None
        self._space: list[str] = []
        self._index = -1
        self._said = False

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._index + 1

    @property
    def fresh(self) -> bool:
        """Whether no text has come yet, or none since the last call or reasoning."""
        return not self._said

    def text(self, text: str) -> None:
        if self._trims or not self._said:
            body = text.rstrip()
            if not body:
                self._space.append(text)
                return
            if self._space:
                self._add(Text, "".join(self._space))
            self._space = [text[len(body) :]] if self._trims and len(body) < len(text) else []
            text = body if self._trims else text
        self._said = True
        self._add(Text, text)

    def reasoning(self, text: str) -> None:
        self._space.clear()
        self._said = False
        self._add(Reasoning, text)

    def begin(self, name: str, written_id: str = "") -> None:
        """A call begins. Its format may have written the id."""
        space = "".join(self._space).partition("\n")[0] if self._said else ""
        if space and not self._strips:
            self._add(Text, space)
        self._space.clear()
        self._close()
        self._index += 1
        self._said = False
        self._out.append(CallBegin(self._index, written_id or call_id(self._ids, name, self._index), name))

    def arguments(self, text: str) -> None:
        self._add(self._call_arguments, text)

    def end(self) -> None:
        """The output is over."""
        if self._space and (self._said or self._index < 0):
            self._add(Text, "".join(self._space))
        self._space.clear()

    def drain(self) -> list[Piece]:
        self._close()
        out, self._out = self._out, []
        return out

    def _call_arguments(self, text: str) -> Piece:
        return CallArguments(self._index, text)

    def _add(self, kind: Callable[[str], Piece], text: str) -> None:
        if kind != self._kind:
            self._close()
            self._kind = kind
        if text:
            self._bits.append(text)

    def _close(self) -> None:
        if self._kind is not None and self._bits:
            self._out.append(self._kind("".join(self._bits)))
        self._bits.clear()
        self._kind = None
