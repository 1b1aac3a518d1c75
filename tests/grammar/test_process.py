"""CompilerProcess: a child that cannot be started, or whose parent is interrupted, is not left running."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator

import pytest

from raylm.core.structure import StructuredOutput
from raylm.errors import Overloaded
from raylm.grammar import process
from raylm.grammar.compiler import GrammarCompiler
from raylm.grammar.frames import Done, Ready, Setup
from raylm.grammar.process import ChildHung, CompilerProcess, setup_of
from raylm.model_files.source import ModelSource

CHOICE = StructuredOutput("choice", '["a"]')


@pytest.fixture
def setup(source: ModelSource) -> Setup:
    return setup_of(source, None, 0, 1 << 30)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started."""
    found: list[subprocess.Popen[bytes]] = []
    real: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def noted(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        found.append(real(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(process.subprocess, "Popen", noted)
    return found


@pytest.fixture
def many_files() -> Iterator[None]:
    """Every descriptor up to 1,100 is taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 1100:
        taken.append(os.dup(taken[0]))
    yield
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_process_with_a_thousand_connections_can_compile(setup: Setup) -> None:
    child = CompilerProcess(setup)
    try:
        assert isinstance(child.compile(CHOICE, 60.0), Done)
    finally:
        child.kill()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_no_file_or_memory_for_a_process_is_a_reason_to_come_back(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    compiler = GrammarCompiler(source)
    with monkeypatch.context() as patch:
        patch.setattr(process.subprocess, "Popen", fail)
        with pytest.raises(Overloaded, match=os.strerror(number)):
            compiler.compile(CHOICE)
    assert compiler.compile(CHOICE).is_ready
    compiler.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("anything")])
def test_an_exception_while_it_starts_ends_it(
    setup: Setup, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(self: CompilerProcess, size: int, deadline: float) -> bytes:
        raise error

    monkeypatch.setattr(CompilerProcess, "_read", fail)
    with pytest.raises(type(error)):
        CompilerProcess(setup)
    (child,) = started
    assert child.poll() is not None


@pytest.mark.parametrize("failure", [ChildHung("it took too long"), Ready("OSError: no file left", is_passing=True)])
def test_one_that_does_not_start_in_time_or_for_want_of_files_may_start_later(
    setup: Setup,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    failure: ChildHung | Ready,
) -> None:
    def ask(self: CompilerProcess, body: bytes, seconds: float) -> Ready:
        if isinstance(failure, Ready):
            return failure
        self.kill()
        raise failure

    monkeypatch.setattr(CompilerProcess, "_ask", ask)
    with pytest.raises(Overloaded, match=r"too long|no file"):
        CompilerProcess(setup)
    (child,) = started
    assert child.poll() is not None


def test_one_that_is_killed_while_it_starts_may_start_later(
    setup: Setup, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = CompilerProcess._read

    def killed(self: CompilerProcess, size: int, deadline: float) -> bytes:
        self._process.kill()
        return read(self, size, deadline)

    monkeypatch.setattr(CompilerProcess, "_read", killed)
    with pytest.raises(Overloaded, match="signal 9"):
        CompilerProcess(setup)
    assert started[0].poll() is not None
