"""What a model wrote becomes pieces, wherever the stream is cut."""

from __future__ import annotations

import pytest

from raylm.generation.parsing import OutputReader, model_format
from raylm.generation.pieces import CallArguments, CallBegin, Piece, Reasoning, Text

HERMES = model_format("", calls="hermes", reasoning="qwen3")


def read(reader: OutputReader, text: str, step: int = 1) -> list[Piece]:
    pieces: list[Piece] = []
    for start in range(0, len(text), step):
        pieces += reader.push(text[start : start + step])
    return joined([*pieces, *reader.finish()])


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one; calls without their ids."""
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, CallBegin):
            out.append(piece._replace(id=""))
        elif out and type(out[-1]) is type(piece):
            out[-1] = piece._replace(text=out[-1].text + piece.text)
        else:
            out.append(piece)
    return out


def call(number: int, name: str, arguments: str) -> list[Piece]:
    return [CallBegin(number, "", name), CallArguments(number, arguments)]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hi there.\n", [Text("Hi there.\n")]),
        (
            "<think>\nhm</think>\n\nHello\n"
            '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>", "b": [1, {}]}}\n</tool_call>\n'
            '<tool_call>{"arguments": {"x":1}, "name":"g"}</tool_call>\n',
            [
                Reasoning("\nhm"),
                Text("\n\nHello"),
                *call(0, "f", '{"a": "}</tool_call>", "b": [1, {}]}'),
                *call(1, "g", '{"x":1}'),
            ],
        ),
        ("<tool_call>nope</tool_call> x", [Text("<tool_call>nope</tool_call> x")]),
        ("  hi <tool_", [Text("  hi <tool_")]),
        ("a <think> b", [Text("a <think> b")]),
        ('<tool_call>{"name": "f"', [Text('<tool_call>{"name": "f"')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', call(0, "f", '{"a": 1')),
    ],
)
def test_hermes(text, pieces, step):
    assert read(OutputReader(HERMES), text, step) == pieces
