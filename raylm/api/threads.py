"""Threads for what would hold the event loop: large bodies, long texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from raylm.api.memory import MemoryReturn
from raylm.errors import RaylmError

SMALL_BODY_BYTES = 16 * 1024
"""A shorter body is read in the event loop: within some 5 ms, whatever it holds."""
SHORT_PROMPT_SIZE = 4096
"""Prompts with fewer characters and token ids in all are tokenised in the event loop: within some 10 ms."""

Result = TypeVar("Result")


class WorkThreads:
    """One thread that parses large bodies, two that tokenise long texts. They end with this object.

    Parsing holds the GIL, and the event loop waits up to 5 ms (sys.getswitchinterval) to get it back: more such threads
    would hold the loop for longer. Tokenising a long text releases the GIL.
    """

    def __init__(self) -> None:
        self._reading = ThreadPoolExecutor(1, "raylm-read")
        self._tokenising = ThreadPoolExecutor(2, "raylm-tokenise")
        self._memory = MemoryReturn(self._reading)

    async def read(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Run what reads a body of this length."""
        return work() if num_bytes <= SMALL_BODY_BYTES else await self._run(self._reading, work, num_bytes)

    async def aside(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Run what may take long, whatever the size of its body, and lets Python's lock go meanwhile."""
        return await self._run(self._tokenising, work, num_bytes)

    async def tokenise(self, size: int, work: Callable[[], Result]) -> Result:
        """Run what tokenises prompts of this many characters and token ids."""
        return work() if size <= SHORT_PROMPT_SIZE else await self._run(self._tokenising, work, size)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], Result], size: int) -> Result:
        try:
            done = await asyncio.get_running_loop().run_in_executor(pool, _outcome, work)
        finally:
            self._memory.used(size)
        if not isinstance(done, _Refused):
            return done
        try:
            raise done.error
        finally:
            del done


class _Refused(NamedTuple):
    error: RaylmError


def _outcome(work: Callable[[], Result]) -> Result | _Refused:
    """What came of it. A refusal is parted from where it was raised: a future holds its error in a cycle, so the frames
    there would hold the body's values until the garbage collector comes."""
    try:
        return work()
    except RaylmError as error:
        error.__context__ = None
        return _Refused(error.with_traceback(None))
