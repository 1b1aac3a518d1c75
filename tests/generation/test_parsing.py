"""What a model wrote becomes pieces, wherever the stream is cut."""

from __future__ import annotations

import pytest

from raylm.generation.parsing import model_format
from raylm.generation.pieces import CallArguments, CallBegin, Piece, Reasoning, Text
from tests.generation.formats import read

HERMES = model_format("", calls="hermes", reasoning="qwen3")


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
    assert read(HERMES, [text[at : at + step] for at in range(0, len(text), step)]) == pieces
