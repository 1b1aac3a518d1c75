"""A child process that compiles grammars, as its parent sees it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
import time
from typing import TypeVar

import msgspec

from raylm.core.structure import StructuredOutput
from raylm.errors import ConfigError, Overloaded
from raylm.grammar.frames import (
    Answer,
    Done,
    Failed,
    Job,
    Ready,
    Request,
    Setup,
    Vocabulary,
    VocabularyJob,
    write_frame,
)
from raylm.model_files.source import ModelSource

START_S = 120.0
RETRY_S = 2.0
"""When a caller may come back whose structured output could not be compiled now."""
_PROGRAM = "import sys; sys.path[:] = {path!r}; from raylm.grammar.child import main; main()"
_Kind = TypeVar("_Kind")


class ChildDied(Exception):
    """The process ended, or had to be ended, before it had answered."""


class ChildHung(ChildDied):
    """It was given no more time."""


class CompilerProcess:
    """One child. Of use until a call of it raises ChildDied."""

    def __init__(self, setup: Setup) -> None:
        """Start it and wait until it is ready.

        Raises ConfigError where it cannot work for this model, and Overloaded where it could not be started now: no
        file, no process or no memory was left, or it died or took too long. Nothing is left running then.
        """
        self._buffer = bytearray()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise _not_now(str(error)) from None
        try:
            ready = self._ask(msgspec.msgpack.encode(setup), START_S)
        except ChildDied as error:
            raise _not_now(str(error)) from None
        if isinstance(ready, Ready) and not ready.error:
            return
        self.kill()
        if isinstance(ready, Ready) and ready.is_passing:
            raise _not_now(ready.error)
        raise ConfigError(f"structured output is not possible with this model: {getattr(ready, 'error', ready)}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def compile(self, structure: StructuredOutput, seconds: float) -> Done | Failed:
        """Raises ChildHung after so many seconds, and ChildDied."""
        answer = self._request(Job(structure), seconds)
        assert isinstance(answer, Done | Failed)
        return answer

    def vocabulary(self) -> Vocabulary:
        answer = self._request(VocabularyJob(), START_S)
        assert isinstance(answer, Vocabulary)
        return answer

    def interrupt(self) -> None:
        """End it from another thread than the one that calls it, whose call raises ChildDied."""
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _request(self, request: Request, seconds: float) -> Answer:
        return self._ask(msgspec.msgpack.encode(request), seconds)

    def _ask(self, body: bytes, seconds: float) -> Answer:
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, body)
            answer: Answer = msgspec.msgpack.decode(self._frame(time.monotonic() + seconds), type=Answer)
            return answer
        except OSError:
            self.kill()
            raise ChildDied(self._how_it_ended()) from None
        except BaseException:
            # A child whose answer was not read to its end would give it to the next request.
            self.kill()
            raise

    def _frame(self, deadline: float) -> bytes:
        head = self._read(4, deadline)
        return self._read(int.from_bytes(head, "little"), deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        # Not select.select, which takes no descriptor over 1,023: an ingress with many connections has more.
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(self._buffer) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(math.ceil(left * 1000)):
                raise ChildHung("it took too long")
            data = os.read(descriptor, 1 << 20)
            if not data:
                self._process.wait()
                raise ChildDied(self._how_it_ended())
            self._buffer += data
        found = bytes(self._buffer[:size])
        del self._buffer[:size]
        return found

    def _how_it_ended(self) -> str:
        code = self._process.poll()
        return f"ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"


def _not_now(reason: str) -> Overloaded:
    return Overloaded(f"The process that compiles grammars could not be started: {reason}", retry_after=RETRY_S)


def setup_of(source: ModelSource, cache_dir: str | None, vocab_size: int, memory_bytes: int) -> Setup:
    return Setup(str(source.path), source.kind, cache_dir, vocab_size, memory_bytes)
