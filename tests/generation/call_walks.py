"""Random answers that a grammar of tool calls allows; the vocabulary is small, with special tokens of all formats."""

from __future__ import annotations

import random

import numpy as np

from raylm.core.structure import StructuredOutput
from raylm.generation.parsing.families import ModelFormat
from raylm.generation.parsing.reader import OutputReader
from raylm.generation.pieces import CallArguments, CallBegin, Piece, Text
from raylm.grammar import binding
from raylm.grammar.special import SpecialTokens, is_text, special_bytes
from raylm.grammar.translate import translate

SPECIAL = (
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]"),
    *("[/THINK]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|tool_call|>", "<|python_tag|>", "<escape>"),
    *("<start_function_call>", "<end_function_call>"),
)
ENDS = ("<|call|>",)
PIECES = (
    '": ',
    '", "',
    '{"',
    '"}',
    "abc",
    "12",
    "],",
    "true",
    '":',
    "<tool_call>",
    "</tool_call>",
    "</parameter>",
    "</",
)
_FIRST_SPECIAL = 256 + len(PIECES)
END = _FIRST_SPECIAL + len(SPECIAL)
TEXTS = [*(bytes([value]) for value in range(256)), *(piece.encode() for piece in PIECES)]
"""What each token adds to the text, before special ones."""
TEXTS += [mark.encode() for mark in SPECIAL] + [b""]
KNOWN = SpecialTokens({mark: _FIRST_SPECIAL + index for index, mark in enumerate(SPECIAL)}, frozenset(ENDS))
_VOCABULARY = [
    special_bytes(index) if _FIRST_SPECIAL <= index < END else text * is_text(text) for index, text in enumerate(TEXTS)
]
_compiler = binding.Compiler(binding.vocabulary(_VOCABULARY, len(_VOCABULARY), [END]))


def compiled(structure: StructuredOutput) -> binding.Compiled:
    return _compiler.compile(translate(structure, KNOWN))


def token_ids(text: str) -> list[int]:
    """A text's tokens: special ones where their text stands, else bytes."""
    found: list[int] = []
    for part in KNOWN.parts(text):
        found += list(part.value.encode()) if hasattr(part, "value") else [part.id]
    return found


def takes(grammar: binding.Compiled, text: str) -> bool:
    """Whether a grammar takes a text as a whole."""
    return number_taken(grammar, text) is None


def number_taken(grammar: binding.Compiled, text: str) -> int | None:
    """How many tokens of a text a grammar takes; None where it takes the whole."""
    matcher = binding.matcher(grammar, [END])
    for count, token in enumerate([*token_ids(text), END]):
        if token not in allowed(matcher):
            return count
        assert matcher.accept_token(token, False)
    return None


def allowed(matcher: binding.Matcher) -> list[int]:
    mask = np.zeros((1, -(-len(TEXTS) // 32)), np.int32)
    matcher.fill_next_token_bitmask(mask, 0, False)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: len(TEXTS)]).tolist()


def walk(grammar: binding.Compiled, rng: random.Random, limit: int = 1500) -> str | None:
    """A random answer; None where it did not end in time, or is no UTF-8."""
    matcher, text, closing_since = binding.matcher(grammar, [END]), b"", 0
    for turn in range(limit):
        tokens = allowed(matcher)
        assert tokens, f"nothing may follow {text!r}"
        if END in tokens and (len(tokens) == 1 or rng.random() < 0.5):
            return text.decode(errors="surrogateescape")
        plain = [token for token in tokens if token >= 256 or 32 <= token < 127]
        closing = [token for token in plain if token != END and TEXTS[token][:1] in b'"}])<\n']
        hurry = rng.random() < min(0.9, 0.2 + (turn - closing_since) / 60)
        token = rng.choice(closing if closing and hurry else plain or tokens)
        if token == END:
            return text.decode(errors="surrogateescape")
        assert matcher.accept_token(token, False)
        text += TEXTS[token]
    return None


def read(form: ModelFormat, tools: dict[str, dict[str, object]], text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls that a reader finds in an answer."""
    reader = OutputReader(form, tools=tools)
    pieces: list[Piece] = [*reader.push(text), *reader.finish()]
    said = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if isinstance(piece, CallBegin):
            calls[piece.number] = [piece.name, ""]
        elif isinstance(piece, CallArguments):
            calls[piece.number][1] += piece.text
    return said, [(name, arguments) for name, arguments in calls.values()]
