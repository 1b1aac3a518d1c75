"""GrammarCompiler: checks structured output off the path of requests, in processes that can be killed.

A structure is turned into a grammar and compiled once as a proof that it can be, within limits. What goes on to the
engine is the grammar's text, not the compiled grammar. Measured with Llama 3's 128,256 tokens and a schema of 50
properties on two cores of a Xeon: the text has 6 KB and compiles in 60 to 75 ms without Python's lock; compiled it
serialises to 3.8 MB in 310 ms and is read back in 150 ms. So each worker compiles the text again, in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raylm.config.source import ModelSource
from raylm.core.structure import StructuredOutput
from raylm.errors import ConfigError, Overloaded, RequestRejected
from raylm.grammar.frames import Done, Failed
from raylm.grammar.process import RETRY_S, ChildDied, ChildHung, CompilerProcess, setup_of
from raylm.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one structure may cost, and how many are compiled at a time.

    seconds: of one compilation. memory_bytes: that a process may allocate beyond what it starts with. schema_bytes: of
    a structure's text. processes: children, each compiling one structure at a time. waiting: structures that may wait
    for one. cached_bytes: of the texts of structures whose outcome is kept.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    schema_bytes: int = 1 << 18
    processes: int = 1
    waiting: int = 256
    cached_bytes: int = 1 << 25


class GrammarCompiler:
    """Compiles structures for one model. Safe to share between threads; `close` ends its processes."""

    def __init__(
        self,
        source: ModelSource,
        *,
        vocab_size: int = 0,
        cache_dir: Path | None = None,
        limits: GrammarLimits | None = None,
    ) -> None:
        """Costs nothing yet: processes start with the first structure, or with `warm`."""
        self._limits = limits or GrammarLimits()
        self._setup = setup_of(
            source, None if cache_dir is None else str(cache_dir), vocab_size, self._limits.memory_bytes
        )
        self._threads = ThreadPoolExecutor(self._limits.processes, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._idle: list[CompilerProcess] = []
        self._busy: set[CompilerProcess] = set()
        self._running: dict[bytes, Future[Done | Failed]] = {}
        self._cache: OrderedDict[bytes, Done | Failed] = OrderedDict()
        self._cached_bytes = 0
        self._closed = False

    def warm(self) -> None:
        """Start a process ahead of the first structure, without waiting for it."""
        self._threads.submit(self._warm)

    def compile(self, structure: StructuredOutput, *, param: str = "structure") -> StructuredOutput:
        """The structure in a form that engines take.

        Raises RequestRejected(param) where it cannot be kept to or costs too much, Overloaded where too many wait.
        """
        with _as_refusal(param):
            answer = self._submit(structure, param).result()
        return _outcome(answer, structure, param)

    async def compile_async(self, structure: StructuredOutput, *, param: str = "structure") -> StructuredOutput:
        """`compile` for an event loop, which it does not hold."""
        # A result that others wait for too must outlive the cancellation of one of them.
        with _as_refusal(param):
            answer = await asyncio.shield(asyncio.wrap_future(self._submit(structure, param)))
        return _outcome(answer, structure, param)

    def close(self) -> None:
        """End the processes; what is being compiled fails."""
        with self._lock:
            self._closed = True
            children = [*self._idle, *self._busy]
            self._idle.clear()
        for child in children:
            child.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _submit(self, structure: StructuredOutput, param: str) -> Future[Done | Failed]:
        size = len(structure.value.encode())
        if size > self._limits.schema_bytes:
            raise RequestRejected(
                f"{param} has {size} bytes, at most {self._limits.schema_bytes} are allowed", param=param
            )
        key = hashlib.sha256(f"{structure.kind}\0{structure.value}".encode()).digest()
        with self._lock:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                done: Future[Done | Failed] = Future()
                done.set_result(known)
                return done
            if (running := self._running.get(key)) is not None:
                return running
            if len(self._running) >= self._limits.waiting or self._closed:
                raise Overloaded("Too many structured outputs wait to be compiled", retry_after=RETRY_S)
            future = self._threads.submit(self._run, key, StructuredOutput(structure.kind, structure.value))
            self._running[key] = future
            return future

    def _run(self, key: bytes, structure: StructuredOutput) -> Done | Failed:
        try:
            answer = self._compile(structure)
        except BaseException:
            with self._lock:
                self._running.pop(key, None)
            raise
        with self._lock:
            self._running.pop(key, None)
            self._keep(key, answer)
        return answer

    def _compile(self, structure: StructuredOutput) -> Done | Failed:
        for attempt in range(2):
            child = self._take()
            try:
                answer = child.compile(structure, self._limits.seconds)
            except ChildHung:
                logger.warning(
                    "A structured output took over %g s to compile; its process was ended", self._limits.seconds
                )
                return Failed(f"it takes more than {self._limits.seconds:g} s to compile, which is the limit")
            except ChildDied as error:
                logger.warning("The process that compiles grammars died: %s", error)
                if self._closed:
                    raise ConfigError("The compiler of grammars was closed") from None
                if attempt:
                    return Failed("its compilation ends the process that does it, or takes too much memory")
            else:
                self._give_back(child)
                return answer
            finally:
                self._busy.discard(child)
        raise AssertionError("unreachable")

    def _take(self) -> CompilerProcess:
        with self._lock:
            child = self._idle.pop() if self._idle else None
            if child is not None:
                self._busy.add(child)
                return child
        child = CompilerProcess(self._setup)
        with self._lock:
            self._busy.add(child)
            if not self._closed:
                return child
        child.kill()
        raise ConfigError("The compiler of grammars was closed")

    def _give_back(self, child: CompilerProcess) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.kill()

    def _warm(self) -> None:
        try:
            child = self._take()
        except (ConfigError, Overloaded) as error:
            logger.warning("Structured output: %s", error)
            return
        self._busy.discard(child)
        self._give_back(child)

    def _keep(self, key: bytes, answer: Done | Failed) -> None:
        self._cache[key] = answer
        self._cached_bytes += _size(answer)
        while self._cached_bytes > self._limits.cached_bytes and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= _size(dropped)


def _outcome(answer: Done | Failed, structure: StructuredOutput, param: str) -> StructuredOutput:
    if isinstance(answer, Failed):
        raise RequestRejected(f"{param}: {answer.message}", param=param, code="invalid_structure")
    return StructuredOutput(answer.structure.kind, answer.structure.value, structure.begin_after)


@contextmanager
def _as_refusal(param: str) -> Iterator[None]:
    """No process can be had: no library, no tokenizer that can be matched, or the end of the compiler."""
    try:
        yield
    except ConfigError as error:
        raise RequestRejected(f"{param}: {error}", param=param, code="unsupported_parameter") from None


def _size(answer: Done | Failed) -> int:
    return 200 + len(answer.structure.value if isinstance(answer, Done) else answer.message)
