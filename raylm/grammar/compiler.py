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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from raylm.core.structure import StructuredOutput
from raylm.errors import ConfigError, Overloaded, RequestRejected, ServerStopped
from raylm.grammar.frames import Done, Failed
from raylm.grammar.outcomes import Outcomes
from raylm.grammar.process import RETRY_S, ChildDied, ChildHung, CompilerProcess, setup_of
from raylm.log import get_logger
from raylm.model_files.source import ModelSource

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one structure may cost, and how many are compiled at a time.

    seconds: of one compilation. memory_bytes: that a process may allocate beyond what it starts with. schema_bytes: of
    a structure's text. processes: children, each compiling one structure at a time. waiting: structures that are
    compiled or wait for a process; None: any number. queue_s: seconds that a request waits until the compilation of its
    structure begins; None: any time. cached_bytes: of the texts of structures whose outcome is kept.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    schema_bytes: int = 1 << 18
    processes: int = 1
    waiting: int | None = 256
    queue_s: float | None = 30.0
    cached_bytes: int = 1 << 25


class _Job:
    """One structure, and how many requests wait for its outcome."""

    __slots__ = ("future", "has_begun", "key", "num_waiting", "structure")

    def __init__(self, key: bytes, structure: StructuredOutput) -> None:
        self.key = key
        self.structure = structure
        self.num_waiting = 0
        self.has_begun = False
        self.future: Future[Done | Failed] = Future()
        # As one that runs it cannot be cancelled: a client that leaves must not take the outcome from the others.
        self.future.set_running_or_notify_cancel()


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
        self._jobs: dict[bytes, _Job] = {}
        """Those that have not ended."""
        self._queue: OrderedDict[bytes, _Job] = OrderedDict()
        """Those of them that have not begun."""
        self._num_working = 0
        """Threads that take jobs."""
        self._outcomes = Outcomes(self._limits.cached_bytes)
        self._closed = False

    def warm(self) -> None:
        """Start a process ahead of the first structure, without waiting for it."""
        self._threads.submit(self._warm)

    def compile(self, structure: StructuredOutput, *, param: str = "structure") -> StructuredOutput:
        """The structure in a form that engines take.

        Raises RequestRejected(param) where it cannot be kept to or costs too much. Another attempt may do after
        Overloaded (too many wait, or none can be compiled now) and ServerStopped (the compiler was closed).
        """
        with _as_refusal(param), self._joined(structure, param) as job:
            wait([job.future], self._limits.queue_s)
            self._check_begun(job)
            answer = job.future.result()
        return _outcome(answer, structure, param)

    async def compile_async(self, structure: StructuredOutput, *, param: str = "structure") -> StructuredOutput:
        """`compile` for an event loop, which it does not hold."""
        with _as_refusal(param), self._joined(structure, param) as job:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(job.future), self._limits.queue_s)
            self._check_begun(job)
            answer = await asyncio.wrap_future(job.future)
        return _outcome(answer, structure, param)

    def close(self) -> None:
        """End the processes; what is being compiled fails."""
        with self._lock:
            self._closed = True
            idle, busy, waiting = [*self._idle], [*self._busy], [*self._queue.values()]
            self._idle.clear()
            self._queue.clear()
        for job in waiting:
            job.future.set_exception(_closed())
        for child in idle:
            child.kill()
        for child in busy:
            child.interrupt()
        self._threads.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def _joined(self, structure: StructuredOutput, param: str) -> Iterator[_Job]:
        """The job of a structure, for which one more waits. A job for which none waits any more does not begin."""
        size = len(structure.value.encode())
        if size > self._limits.schema_bytes:
            raise RequestRejected(
                f"{param} has {size} bytes, at most {self._limits.schema_bytes} are allowed", param=param
            )
        key = hashlib.sha256(f"{structure.kind}\0{structure.value}".encode()).digest()
        with self._lock:
            job = self._job(key, StructuredOutput(structure.kind, structure.value))
            job.num_waiting += 1
        try:
            yield job
        finally:
            with self._lock:
                job.num_waiting -= 1
                if not job.num_waiting and self._queue.pop(key, None) is not None:
                    del self._jobs[key]

    def _job(self, key: bytes, structure: StructuredOutput) -> _Job:
        """One that has ended, or that others wait for, or a new one."""
        if (running := self._jobs.get(key)) is not None:
            return running
        job = _Job(key, structure)
        if (known := self._outcomes.get(key)) is not None:
            job.has_begun = True
            job.future.set_result(known)
            return job
        if self._closed:
            raise _closed()
        if self._limits.waiting is not None and len(self._jobs) >= self._limits.waiting:
            raise Overloaded(
                f"{len(self._jobs)} structured outputs wait to be compiled, the most that may", retry_after=RETRY_S
            )
        self._jobs[key] = self._queue[key] = job
        if self._num_working < self._limits.processes:
            self._threads.submit(self._work)
            self._num_working += 1
        return job

    def _check_begun(self, job: _Job) -> None:
        if not job.has_begun and not job.future.done():
            raise Overloaded(
                f"The structured output has waited {self._limits.queue_s:g} s to be compiled, which is the limit",
                retry_after=RETRY_S,
            )

    def _work(self) -> None:
        """Compile what waits, until nothing does."""
        while (job := self._next()) is not None:
            answer: Done | Failed | None = None
            error: BaseException | None = None
            try:
                answer = self._compile(job.structure)
            except BaseException as caught:
                error = caught
            with self._lock:
                del self._jobs[job.key]
                if answer is not None:
                    self._outcomes.put(job.key, answer)
            if answer is not None:
                job.future.set_result(answer)
            else:
                job.future.set_exception(error)

    def _next(self) -> _Job | None:
        with self._lock:
            if not self._queue:
                self._num_working -= 1
                return None
            _, job = self._queue.popitem(last=False)
            job.has_begun = True
            return job

    def _compile(self, structure: StructuredOutput) -> Done | Failed:
        for attempt in range(2):
            child = self._take()
            try:
                answer = child.compile(structure, self._limits.seconds)
            except ChildHung:
                logger.warning(
                    "A structured output took over %g s to compile; its process was ended", self._limits.seconds
                )
                message = f"it takes more than {self._limits.seconds:g} s to compile, which is the limit"
                return Failed(message, is_passing=True)
            except ChildDied as error:
                if self._closed:
                    raise _closed() from None
                logger.warning("The process that compiles grammars died: %s", error)
                if attempt:
                    message = "its compilation ends the process that does it, or takes too much memory"
                    return Failed(message, is_passing=True)
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
        raise _closed()

    def _give_back(self, child: CompilerProcess) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.kill()

    def _warm(self) -> None:
        try:
            child = self._take()
        except (ConfigError, Overloaded, ServerStopped) as error:
            logger.warning("Structured output: %s", error)
            return
        self._busy.discard(child)
        self._give_back(child)


def _outcome(answer: Done | Failed, structure: StructuredOutput, param: str) -> StructuredOutput:
    if isinstance(answer, Failed):
        raise RequestRejected(f"{param}: {answer.message}", param=param, code="invalid_structure")
    return StructuredOutput(answer.structure.kind, answer.structure.value, structure.begin_after)


@contextmanager
def _as_refusal(param: str) -> Iterator[None]:
    """No process can ever be had: no library, or no tokenizer that can be matched."""
    try:
        yield
    except ConfigError as error:
        raise RequestRejected(f"{param}: {error}", param=param, code="unsupported_parameter") from None


def _closed() -> ServerStopped:
    return ServerStopped("The structured output's compilation was stopped, with its model or the server")
