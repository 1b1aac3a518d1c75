"""Which engine gets a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager

from raylm.config.routing import RoutingConfig
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.errors import Overloaded
from raylm.serving.directory import ModelEntry, StartFailure
from raylm.serving.routing.choice import Ask, Choice
from raylm.serving.routing.engines import RoutedEngine
from raylm.serving.routing.failover import Journey
from raylm.serving.routing.selector import Prompt, Selector

_RETRY_AFTER_S = 5.0
_LOOK_EVERY_S = 0.05


class ModelRouter:
    """Chooses an engine for each request of one version of a model."""

    def __init__(self, name: str, config: RoutingConfig | None = None, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called again and again while a request waits and no engine is about to take it."""
        self.name = name
        self._wake = wake
        self.config = config or RoutingConfig()
        self.selector = Selector(self.config)
        """It chooses, and counts its decisions."""
        self.since = 0.0
        """When the youngest replica of this version began."""
        self.engines: dict[str, RoutedEngine] = {}
        self.may_sleep = False
        """It may have no engine while nobody asks."""
        self.failure: StartFailure | None = None
        """Why the last replica that was to start has not."""
        self.closed: str | None = None
        """Why no more requests are taken."""
        self.num_held = 0
        """New requests that wait for an engine now."""
        self.num_resumed = 0
        """Live requests that went on at another engine, since the start."""
        self._failed_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    @property
    def usable(self) -> list[RoutedEngine]:
        return [engine for engine in list(self.engines.values()) if engine.is_usable]

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine that does not go, reachable or not."""
        return any(engine.entry.state == "ready" for engine in self.engines.values())

    @property
    def fitness(self) -> tuple[bool, int, float]:
        """The greater, the better the version for the next request: the least busy engine counts, so that all are used
        while an upgrade goes on; then the younger version."""
        pressures = [engine.client.pressure for engine in self.usable]
        return bool(pressures), -min(pressures, default=0), self.since

    def generate(
        self, request_ids: Sequence[str], prompt_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> Journey:
        """Generate on engines that are chosen; what this returns raises what goes wrong. Raises Overloaded when the
        router is closed."""
        if self.closed is not None:
            raise Overloaded(self.closed, retry_after=_RETRY_AFTER_S)
        return Journey(self, request_ids, prompt_ids, params, options)

    def choose(self, ask: Ask, *, avoid: Set[str] = frozenset()) -> Choice | None:
        """An engine by routing.policy, none of those to `avoid` (ids); None where there is none."""
        engines = [engine for engine in self.usable if engine.entry.engine_id not in avoid]
        if not engines:
            return None
        options = ask.options
        prompt = Prompt(ask.prompt_ids, session=options.session, salt=options.cache_salt)
        at, reason, matched = self.selector.select([engine.view for engine in engines], prompt)
        return Choice(engines[at], reason, matched)

    def follow(self) -> None:
        """Keep up with what the engines have cached, where there is a choice among several."""
        wanted = self.config.policy == "prefix" and len(self.engines) > 1
        for engine in self.engines.values():
            engine.follow(wanted)

    def note(self, entry: ModelEntry) -> None:
        """What the Directory says of the model by now."""
        self.since = max(self.since, entry.since)
        self.may_sleep = entry.may_sleep
        if entry.failure is not None and entry.failure != self.failure:
            self._failed_at = time.monotonic()
        self.failure = entry.failure

    def hold_s(self, since: float) -> float:
        """Seconds that a new request may wait which waits since then (time.monotonic)."""
        config = self.config
        wakes_up = self.may_sleep and self._failed_at < since
        return max(config.hold_s, config.wake_s) if wakes_up else config.hold_s

    def refusal(self) -> Overloaded:
        """Of a request that has waited for so long."""
        why = "" if self.failure is None else f"; its last start failed: {self.failure.reason}"
        return Overloaded(f"no engine serves {self.name!r} at the moment{why}", retry_after=_RETRY_AFTER_S)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around the wait of a new request. Raises Overloaded where max_held_requests wait."""
        if self.num_held >= self.config.max_held_requests:
            raise Overloaded(
                f"no engine serves {self.name!r} at the moment, and {self.num_held} requests wait for one; "
                f"routing.max_held_requests allows {self.config.max_held_requests}",
                retry_after=_RETRY_AFTER_S,
            )
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1

    async def engine_there(self, limit_s: float) -> None:
        """Return when an engine is there, after a moment at least, or after so many seconds."""
        if not self.has_engine:
            self._wake()
        if self._looking is None or self._looking.done():
            # One look for all who wait.
            self._looking = asyncio.create_task(self._look())
        await asyncio.wait((self._looking,), timeout=limit_s)

    def resumed(self) -> None:
        """A live request goes on at another engine."""
        self.num_resumed += 1

    async def _look(self) -> None:
        await asyncio.sleep(_LOOK_EVERY_S)
        while not self.usable and self.closed is None:
            await asyncio.sleep(_LOOK_EVERY_S)
