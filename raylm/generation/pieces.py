"""What a model's text is made of, as it comes."""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """Part of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """Part of what the model thinks before it answers."""

    text: str


class CallBegin(NamedTuple):
    """A call of a tool begins; the calls of an answer are counted from 0."""

    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """Part of the arguments of a call; its parts together are JSON."""

    number: int
    text: str


Piece = Text | Reasoning | CallBegin | CallArguments
