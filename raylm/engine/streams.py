"""What lies between a client's socket and the readers of its requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from raylm.core.events import EventBatch, EventSnapshot
from raylm.core.step import TokenDelta, join_logprobs
from raylm.errors import Overloaded, RequestLost, RequestRejected

MAX_PENDING_EVENTS = 100_000
"""Events kept for a follower that does not read; past that it gets a new snapshot instead."""
ChannelError = RequestRejected | Overloaded | RequestLost


class Sequences:
    """The deltas of one prompt's sequences, until all have ended; of several steps merged where the reader is behind.

    Who leaves early must close it. Raises RequestRejected, Overloaded or RequestLost, for all sequences at once.
    """

    def __init__(self, request_ids: Sequence[str], release: Callable[[str, bool], None]) -> None:
        """`release(id, abort)` is called once for each sequence; with `abort` the engine does not know of its end."""
        self._release = release
        self._live = dict.fromkeys(request_ids)
        self._pending: dict[str, list[TokenDelta]] = {}
        self._error: ChannelError | None = None
        self._is_admitted = False
        self._arrived = asyncio.Event()

    @property
    def engine_id(self) -> str:
        return ""

    @property
    def route(self) -> str:
        return ""

    async def admitted(self) -> None:
        """Return once the engine has taken the request into its queue.

        Raises RequestRejected or Overloaded where it was refused, RequestLost where it was lost before.
        """
        while not self._is_admitted and self._live:
            self._arrived.clear()
            await self._arrived.wait()
        if not self._is_admitted and self._error is not None:
            raise self._error

    def __aiter__(self) -> Sequences:
        return self

    async def __anext__(self) -> TokenDelta:
        """All that has come for the sequence that has waited longest, as one delta."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._live:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return merged(self._pending.pop(next(iter(self._pending))))

    def end(self, request_id: str) -> None:
        """The reader needs no more of this sequence: the engine is told at once. No error when it has ended."""
        self._pending.pop(request_id, None)
        self._forget(request_id, abort=True)

    def abort(self) -> None:
        """End the sequences that have not ended; the reader gets what has come, and the finish reason "abort"."""
        self._is_admitted = True
        for request_id in list(self._live):
            self._pending.setdefault(request_id, []).append(TokenDelta(request_id, [], "abort"))
            self._forget(request_id, abort=True)
        self._arrived.set()

    async def aclose(self) -> None:
        """Abort the sequences that have not ended."""
        for request_id in list(self._live):
            self.end(request_id)
        self._pending.clear()

    def admit(self) -> None:
        """The engine has taken the request."""
        self._is_admitted = True
        self._arrived.set()

    def push(self, delta: TokenDelta) -> None:
        """What came from the engine."""
        self._is_admitted = True
        self._pending.setdefault(delta.request_id, []).append(delta)
        if delta.finish_reason is not None:
            self._forget(delta.request_id, abort=False)
        self._arrived.set()

    def fail(self, error: ChannelError) -> None:
        """No sequence will get anything more; the reader sees it after what has already come."""
        for request_id in list(self._live):
            self._forget(request_id, abort=False)
        self._error = error
        self._arrived.set()

    def _forget(self, request_id: str, *, abort: bool) -> None:
        if request_id in self._live:
            del self._live[request_id]
            self._release(request_id, abort)


def merged(deltas: list[TokenDelta]) -> TokenDelta:
    """Deltas of one sequence, in order, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return deltas[-1]._replace(
        token_ids=[token for delta in deltas for token in delta.token_ids],
        num_cached_tokens=deltas[0].num_cached_tokens,
        logprobs=join_logprobs(delta.logprobs for delta in deltas),
        prompt_logprobs=deltas[0].prompt_logprobs,
        waited=deltas[0].waited,
    )


class OrderAnswer:
    """What an engine says of an order that it was given."""

    def __init__(self) -> None:
        self._future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    async def wait(self) -> list[str]:
        """Raises RequestRejected, Overloaded, RequestLost."""
        return await self._future

    def give(self, answers: list[str]) -> None:
        if not self._future.done():
            self._future.set_result(answers)

    def fail(self, error: ChannelError) -> None:
        if not self._future.done():
            self._future.set_exception(error)


class EventFeed:
    """A snapshot of the engine's cached blocks, then every event after it: no gap and nothing twice.

    After a loss, or where the reader is too far behind, another snapshot comes, and everything before it is void.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` makes the engine send a snapshot."""
        self._ask = ask
        self._pending: deque[EventSnapshot | EventBatch] = deque()
        self._num_events = 0
        self._next: int | None = None
        self._lost = True
        self._error: ChannelError | None = None
        self._arrived = asyncio.Event()

    async def next(self) -> EventSnapshot | EventBatch:
        """Raises RequestRejected where the engine keeps no events, RequestLost, Overloaded."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._lost:
                # Asked for by the reader, so that one who has stopped reading costs the engine nothing.
                self._ask()
                self._lost = False
            self._arrived.clear()
            await self._arrived.wait()
        item = self._pending.popleft()
        if isinstance(item, EventBatch):
            self._num_events -= len(item.events)
        return item

    def begin(self, snapshot: EventSnapshot) -> None:
        """A snapshot came."""
        self._clear()
        self._next = snapshot.next
        self._pending.append(snapshot)
        self._arrived.set()

    def push(self, batch: EventBatch) -> None:
        """A batch came. What the snapshot holds already is cut off; one that begins too late means a loss."""
        if self._next is None:
            return
        known = self._next - batch.first
        if known >= len(batch.events):
            return
        fresh = len(batch.events) - known
        if known < 0 or self._num_events + fresh > MAX_PENDING_EVENTS:
            self._clear()
            self._lost = True
        else:
            self._pending.append(EventBatch(self._next, batch.events[known:]))
            self._num_events += fresh
            self._next += fresh
        self._arrived.set()

    def fail(self, error: ChannelError) -> None:
        """Nothing more will come. What was first is the reason."""
        self._error = self._error or error
        self._arrived.set()

    def _clear(self) -> None:
        self._pending.clear()
        self._num_events = 0
        self._next = None
