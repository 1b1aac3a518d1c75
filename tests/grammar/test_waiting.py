"""Requests that wait for a GrammarCompiler: those that leave keep no place, none waits for ever, all are answered."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from raylm.api.errors import http_error
from raylm.core.structure import StructuredOutput
from raylm.errors import Overloaded, RaylmError, ServerStopped
from raylm.grammar.compiler import GrammarCompiler, GrammarLimits
from raylm.grammar.frames import Done
from raylm.model_files.source import ModelSource

READY = StructuredOutput("grammar", 'root ::= "a"')


def regex(text: str) -> StructuredOutput:
    return StructuredOutput("regex", text)


class Gate:
    """Stands in for the compilation: notes what is compiled, and holds it until `may_go` is set."""

    def __init__(self, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        self.has_begun = threading.Event()
        self.may_go = threading.Event()
        monkeypatch.setattr(compiler, "_compile", self._compile)

    def _compile(self, structure: StructuredOutput) -> Done:
        self.compiled.append(structure.value)
        self.has_begun.set()
        assert self.may_go.wait(60)
        return Done(READY)


@pytest.fixture
def compiler(source: ModelSource, request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(source, limits=getattr(request, "param", None))
    yield made
    made.close()


async def leave(tasks: list[asyncio.Task[StructuredOutput]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_structures_whose_clients_left_are_not_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(compiler, monkeypatch)
    first = asyncio.create_task(compiler.compile_async(regex("first")))
    await asyncio.to_thread(gate.has_begun.wait, 60)
    others = [asyncio.create_task(compiler.compile_async(regex(f"left {number}"))) for number in range(255)]
    kept = asyncio.create_task(compiler.compile_async(regex("left 7")))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="256 structured outputs wait"):
        await compiler.compile_async(regex("one more"))
    await leave(others)
    later = asyncio.create_task(compiler.compile_async(regex("one more")))
    await asyncio.sleep(0)
    gate.may_go.set()
    assert await asyncio.gather(first, kept, later) == [READY] * 3
    assert gate.compiled == ["first", "left 7", "one more"]


async def test_a_request_waits_for_its_turn_for_limited_time(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(compiler, monkeypatch)
    first = asyncio.create_task(compiler.compile_async(regex("first")))
    await asyncio.to_thread(gate.has_begun.wait, 60)
    # From now on: the first one's thread may take longer than that to begin.
    monkeypatch.setattr(compiler, "_limits", dataclasses.replace(compiler._limits, queue_s=0.02))
    for attempt in (compiler.compile_async(regex("async")), asyncio.to_thread(compiler.compile, regex("thread"))):
        with pytest.raises(Overloaded, match=r"has waited 0\.02 s") as caught:
            await attempt
        assert http_error(caught.value).status == 503
    gate.may_go.set()
    assert await first == READY
    assert gate.compiled == ["first"]


@pytest.mark.parametrize("compiler", [GrammarLimits(waiting=None, queue_s=None)], indirect=True)
async def test_without_limits_all_wait(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(compiler, monkeypatch)
    asked = [asyncio.create_task(compiler.compile_async(regex(f"number {number}"))) for number in range(400)]
    await asyncio.to_thread(gate.has_begun.wait, 60)
    gate.may_go.set()
    assert await asyncio.gather(*asked) == [READY] * 400


async def test_all_that_wait_are_told_to_come_again_when_it_closes(compiler: GrammarCompiler) -> None:
    await compiler.compile_async(regex("before"))
    (child,) = compiler._idle
    os.kill(child.pid, signal.SIGSTOP)
    asked = [asyncio.create_task(compiler.compile_async(regex(f"number {number}"))) for number in range(3)]
    while child not in compiler._busy:
        await asyncio.sleep(0)
    await asyncio.to_thread(compiler.close)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    with pytest.raises(ServerStopped):
        await compiler.compile_async(regex("after"))
    for answer in answers:
        assert isinstance(answer, RaylmError)
        assert http_error(answer).status == 503
