"""CompiledGrammars: which of them are kept, and how they end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raylm.core.structure import StructuredOutput
from raylm.grammar import binding
from raylm.grammar import compiled as module
from raylm.grammar.compiled import CompiledGrammars
from raylm.model_files.source import locate
from tests.grammar.walks import compiled
from tests.support import checkpoints

A, B, C = (StructuredOutput("grammar", f'root ::= "{letter}"') for letter in "abc")


class Compiler:
    """binding.Compiler without its vocabulary, which notes what it compiles."""

    def __init__(self) -> None:
        self.asked: list[StructuredOutput] = []

    def compile(self, structure: StructuredOutput) -> binding.Compiled:
        self.asked.append(structure)
        return compiled(structure)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(CompiledGrammars, "_get_compiler", lambda self: made)
    return made


@pytest.fixture
def grammars(tmp_path: Path, compiler: Compiler) -> Iterator[CompiledGrammars]:
    made = CompiledGrammars(locate(str(checkpoints.llama(tmp_path))), 300)
    yield made
    made.close()


def get(grammars: CompiledGrammars, structure: StructuredOutput) -> binding.Compiled:
    return grammars.get(structure).result(60)


def test_the_oldest_are_dropped_by_size(
    grammars: CompiledGrammars, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_COMPILED_BYTES", get(grammars, A).memory_size_bytes())
    for structure in (B, A, A, C, A):
        get(grammars, structure)
    # Room for A and the one that has just come: C drops B, and not A, which was asked for after it.
    assert compiler.asked == [A, B, C]
    get(grammars, B)
    assert compiler.asked == [A, B, C, B]


def test_a_grammar_that_a_row_holds_is_not_compiled_again(
    grammars: CompiledGrammars, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_COMPILED_BYTES", 0)
    held = grammars.get(A)
    held.result(60)
    get(grammars, B)
    get(grammars, C)
    assert grammars.get(A) is held and compiler.asked == [A, B, C]
    get(grammars, B)
    assert compiler.asked == [A, B, C, B]


def test_nothing_is_compiled_after_the_end(grammars: CompiledGrammars) -> None:
    grammars.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        grammars.get(A)
