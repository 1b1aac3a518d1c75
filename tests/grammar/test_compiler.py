"""GrammarCompiler: what is dear, hostile or deadly fails its own request, and the next one finds a living process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylm.core.structure import StructuredOutput
from raylm.errors import RequestRejected
from raylm.grammar import outcomes
from raylm.grammar.compiler import GrammarCompiler, GrammarLimits
from raylm.grammar.process import ChildDied, ChildHung, CompilerProcess
from raylm.model_files.source import ModelSource

SCHEMA = StructuredOutput("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
DEAR = StructuredOutput("json_schema", json.dumps({"enum": [f"{i:x}" for i in range(32_000)]}))
"""Seconds of work."""


@pytest.fixture(scope="module")
def compiler(source: ModelSource) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(source)
    yield made
    made.close()


def test_every_kind_becomes_what_engines_take(compiler: GrammarCompiler) -> None:
    values = {
        "json_object": "",
        "json_schema": SCHEMA.value,
        "regex": "a+",
        "choice": '["a", "b"]',
        "grammar": 'root ::= "a"',
        "structural_tag": '{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}',
    }
    for kind, value in values.items():
        ready = compiler.compile(StructuredOutput(kind, value, (3, 4)))
        assert ready.is_ready
        assert ready.begin_after == (3, 4)


def test_a_refusal_names_the_field_and_the_place(compiler: GrammarCompiler) -> None:
    bad = StructuredOutput("json_schema", '{"properties": {"a": {"type": "array", "minItems": 3, "maxItems": 2}}}')
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestRejected, match="minItems 3 is over maxItems 2") as caught:
            compiler.compile(bad, param="response_format")
        assert caught.value.param == "response_format"
        assert "#/properties/a" in str(caught.value)


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (StructuredOutput("grammar", 'root ::= "a'), "Expect"),
        (StructuredOutput("grammar", "root ::= other"), "other"),
        (StructuredOutput("grammar", 'start ::= "a"'), "root"),
        (StructuredOutput("grammar", "root ::= a\na ::= a"), "no token"),
        (StructuredOutput("regex", "(?=a)b"), "lookahead"),
        (StructuredOutput("structural_tag", '{"type": "structural_tag", "format": {"type": "nothing"}}'), "nothing"),
    ],
)
def test_what_xgrammar_refuses_is_refused(compiler: GrammarCompiler, structure: StructuredOutput, reason: str) -> None:
    with pytest.raises(RequestRejected, match=reason):
        compiler.compile(structure)


TWO_KINDS = [{"type": "object", "properties": {"k": {"const": i}}, "required": [["k"]]} for i in (1, 2)]


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", f'{{"minimum": {"1" * 5000}}}', "an integer has 5000 digits, at most 4300"),
        ("json_schema", f'{{"$ref": "#/enum/{"1" * 5000}", "enum": [1]}}', "points to nothing"),
        ("json_schema", '{"const": 1e99999999999999999999999}', "a number that cannot be read"),
        ("json_schema", json.dumps({"oneOf": TWO_KINDS}), "oneOf"),
        ("json_schema", '{"properties": {"\\ud800": {"type": "foo"}}}', r"#/properties/\\ud800: type must be one of"),
        ("choice", f"[{'1' * 5000}]", "an integer has 5000 digits"),
        ("structural_tag", f'{{"type": "structural_tag", "format": {"1" * 5000}}}', "an integer has 5000 digits"),
        (
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "const_string", "value": "\\ud800"}}',
            "half of a surrogate pair",
        ),
        ("regex", r"\W" * 130, r"its grammar has \d{7} bytes, at most 1048576 are allowed"),
    ],
    ids=lambda value: value[:30],
)
def test_nothing_that_a_client_writes_ends_the_process(
    compiler: GrammarCompiler, kind: str, value: str, reason: str
) -> None:
    compiler.compile(StructuredOutput("json_object"))
    (child,) = compiler._idle
    with pytest.raises(RequestRejected, match=reason):
        compiler.compile(StructuredOutput(kind, value))
    assert compiler._idle == [child]


def test_one_that_hangs_is_ended_and_the_next_is_served(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(source, limits=GrammarLimits(seconds=0.5))
    try:
        with pytest.raises(RequestRejected, match=r"more than 0\.5 s"):
            compiler.compile(DEAR)
        # A busy machine may take as long over the next one, which is cheap.
        monkeypatch.setattr(compiler, "_limits", dataclasses.replace(compiler._limits, seconds=120.0))
        assert compiler.compile(StructuredOutput("choice", '["a"]')).is_ready
    finally:
        compiler.close()


def test_one_that_took_too_long_once_may_be_asked_for_later(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = StructuredOutput("regex", "slow once")

    def hang(self: CompilerProcess, structure: StructuredOutput, seconds: float) -> None:
        self.kill()
        raise ChildHung("it took too long")

    with monkeypatch.context() as patch:
        patch.setattr(CompilerProcess, "compile", hang)
        patch.setattr(outcomes, "PASSING_KEPT_S", 0.0)
        with pytest.raises(RequestRejected, match="more than 10 s"):
            compiler.compile(slow)
    assert compiler.compile(slow).is_ready


def test_one_that_wants_too_much_memory_fails_alone(source: ModelSource) -> None:
    compiler = GrammarCompiler(source, limits=GrammarLimits(memory_bytes=1 << 24, seconds=120.0))
    try:
        with pytest.raises(RequestRejected, match="memory"):
            compiler.compile(DEAR)
        assert compiler.compile(StructuredOutput("choice", '["a"]')).is_ready
    finally:
        compiler.close()


def test_a_process_that_died_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutput("regex", "before"))
    (child,) = compiler._idle
    os.kill(child.pid, signal.SIGKILL)
    assert compiler.compile(StructuredOutput("regex", "after")).is_ready


def test_one_that_kills_its_process_twice_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: CompilerProcess, structure: StructuredOutput, seconds: float) -> None:
        self.kill()
        raise ChildDied("ended by signal 11")

    deadly = StructuredOutput("regex", "deadly")
    with monkeypatch.context() as patch:
        patch.setattr(CompilerProcess, "compile", die)
        patch.setattr(outcomes, "PASSING_KEPT_S", 0.0)
        with pytest.raises(RequestRejected, match="ends the process"):
            compiler.compile(deadly)
    assert compiler.compile(StructuredOutput("regex", "harmless")).is_ready
    assert compiler.compile(deadly).is_ready  # it was not its fault, and that is not kept for long


def test_equal_structures_are_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = CompilerProcess.compile
    may_go = threading.Event()

    def counted(self: CompilerProcess, structure: StructuredOutput, seconds: float) -> object:
        calls.append(structure)
        may_go.wait(60)
        return original(self, structure, seconds)

    monkeypatch.setattr(CompilerProcess, "compile", counted)
    same = StructuredOutput("regex", "twenty at once")

    async def ask() -> list[StructuredOutput]:
        asked = [asyncio.ensure_future(compiler.compile_async(same)) for _ in range(20)]
        await asyncio.sleep(0)
        asked.pop().cancel()
        may_go.set()
        return await asyncio.gather(*asked)

    answers = asyncio.run(ask())
    assert len(calls) == 1
    assert len(set(answers)) == 1
    compiler.compile(same)
    assert len(calls) == 1


def test_a_structure_over_the_limit_is_refused_unseen(source: ModelSource) -> None:
    compiler = GrammarCompiler(source, limits=GrammarLimits(schema_bytes=10))
    with pytest.raises(RequestRejected, match="at most 10 are allowed"):
        compiler.compile(SCHEMA)
    assert not compiler._idle
    compiler.close()


def test_a_model_without_a_tokenizer_refuses_structures(tmp_path: Path) -> None:
    compiler = GrammarCompiler(ModelSource(tmp_path, "folder"))
    with pytest.raises(RequestRejected, match="not possible with this model"):
        compiler.compile(SCHEMA)
    compiler.close()


def test_closing_ends_the_processes(source: ModelSource) -> None:
    compiler = GrammarCompiler(source)
    compiler.compile(StructuredOutput("choice", '["a"]'))
    (child,) = compiler._idle
    compiler.close()
    assert child._process.poll() is not None
