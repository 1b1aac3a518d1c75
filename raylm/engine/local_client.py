"""LocalClient: EngineClient's face for an engine of this process, which a thread drives."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta
from raylm.engine.engine import Engine
from raylm.engine.feeder import Feeder, Group
from raylm.engine.streams import ChannelError, Sequences, merged
from raylm.errors import EngineDeadError, Overloaded, RequestRejected
from raylm.log import get_logger

logger = get_logger(__name__)


class LocalClient:
    """Generates on an engine that it owns. However much is asked for at once, the engine gets what it has room for.
    `generate` belongs to one event loop."""

    def __init__(self, engine: Engine, *, holds: bool = True) -> None:
        """`holds`: a sequence without stop strings comes as one delta at its end, for throughput where nobody needs a
        token before that; otherwise tokens come as steps give them."""
        self._engine = engine
        self._holds = holds
        self._feeder = Feeder(engine)
        self._inbox: queue.SimpleQueue[Group | str | None] = queue.SimpleQueue()
        self._sequences: dict[str, Sequences] = {}
        self._held: dict[str, list[TokenDelta]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False
        self.failure: str | None = None
        """Why the engine died, once it has."""
        self._thread = threading.Thread(target=self._run, name="raylm-engine", daemon=True)
        self._thread.start()

    def generate(
        self, request_ids: Sequence[str], prompt_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> Sequences:
        """One sequence for each id; ids must be new. Raises EngineDeadError when the engine has stopped."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        self._loop = asyncio.get_running_loop()
        sequences = Sequences(request_ids, self._release)
        self._sequences.update(dict.fromkeys(request_ids, sequences))
        self._inbox.put(Group(list(request_ids), prompt_ids, params, options))
        return sequences

    def close(self) -> None:
        """End every request and give back the engine's memory."""
        self._inbox.put(None)
        self._thread.join()

    def _release(self, request_id: str, abort: bool) -> None:
        del self._sequences[request_id]
        if abort:
            self._inbox.put(request_id)

    # In the engine's thread from here on.

    def _run(self) -> None:
        failure = "the engine was closed"
        try:
            while not self._is_closing:
                self._take_messages()
                self._feed()
                self._deliver(self._engine.step())
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            logger.error("the engine stopped: %s", failure)
        finally:
            self._engine.shutdown()
            self.failure = failure
            self._call(self._fail_all, failure)

    def _take_messages(self) -> None:
        """Take every message that is there; wait for the first when there is nothing else to do."""
        wait = not self._engine.has_work and self._feeder.is_empty
        with suppress(queue.Empty):
            while not self._is_closing:
                self._take(self._inbox.get(block=wait))
                wait = False

    def _take(self, message: Group | str | None) -> None:
        if message is None:
            self._is_closing = True
        elif isinstance(message, Group):
            self._feeder.put(message)
        else:
            self._held.pop(message, None)
            if self._engine.abort(message) is None:
                self._feeder.drop(message)

    def _feed(self) -> None:
        added = []
        for group in self._feeder.ready():
            try:
                self._engine.add(*group)
            except (RequestRejected, Overloaded) as error:
                self._call(self._fail, group.ids[0], error)
                continue
            added.append(group.ids[0])
            if self._holds and not group.params.stop:
                self._held.update((request_id, []) for request_id in group.ids)
        if added:
            # One call of the event loop for all of them.
            self._call(self._admit, added)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        """One call of the event loop for all that a step gave."""
        news = [delta for delta in map(self._hold, deltas) if delta is not None]
        if news:
            self._call(self._push, news)

    def _hold(self, delta: TokenDelta) -> TokenDelta | None:
        held = self._held.get(delta.request_id)
        if held is None:
            return delta
        held.append(delta)
        return merged(self._held.pop(delta.request_id)) if delta.finish_reason is not None else None

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        # Before the first request there is no loop, and a loop that was closed has no readers.
        with suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *arguments)

    # In the event loop.

    def _admit(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if (sequences := self._sequences.get(request_id)) is not None:
                sequences.admit()

    def _push(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if (sequences := self._sequences.get(delta.request_id)) is not None:
                sequences.push(delta)

    def _fail(self, request_id: str, error: ChannelError) -> None:
        if (sequences := self._sequences.get(request_id)) is not None:
            sequences.fail(error)

    def _fail_all(self, reason: str) -> None:
        for sequences in list(self._sequences.values()):
            sequences.fail(EngineDeadError(reason))
