"""The real engine, fed with simulated arrivals on a simulated clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from raylm.config.engine import CacheConfig, ModelConfig
from raylm.config.resolve import ResolvedEngine, ResolvedRuntime, ResolvedScheduler
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.core.step import TokenDelta
from raylm.engine.engine import Engine
from raylm.errors import ConfigError, Overloaded
from raylm.sim.cost import DeviceCost
from raylm.sim.executor import SimulatedExecutor
from raylm.sim.traces import Arrival

_PLANS_IN_FLIGHT = 2
_OWN_TOKENS = 1 << 16
"""Token ids from here on stand for a request, those below for a tenant."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The simulated engine. `deadline_s` is every request's own."""

    scheduler: ResolvedScheduler
    cost: DeviceCost
    num_blocks: int
    block_size: int = 16
    deadline_s: float | None = None


@dataclass(slots=True)
class Served:
    """What became of one arrival: when its tokens came, in seconds, and how it ended.

    `end` is "length", "deadline" or "refused".
    """

    arrival: Arrival
    times: list[float] = field(default_factory=list)
    end: str = ""

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.arrival.at if self.times else None

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    def take(self, delta: TokenDelta, now: float) -> None:
        self.times += [now] * len(delta.token_ids)
        self.end = delta.finish_reason or ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A whole simulation; `served` is in the order of arrival."""

    served: list[Served]
    seconds: float
    num_preemptions: int
    prefix_hit_rate: float


class Simulation:
    """One engine and what arrives at it. As at a real one, requests are taken in between two steps."""

    def __init__(self, arrivals: Sequence[Arrival], setup: Setup) -> None:
        """Raises ConfigError when the cache cannot hold the longest request."""
        if not arrivals:
            raise ConfigError("a simulation needs at least 1 request")
        self._deadline_s = setup.deadline_s
        self._served = [Served(arrival) for arrival in arrivals]
        self._coming = deque(range(len(arrivals)))
        self._tenants = {name: index for index, name in enumerate(sorted({one.tenant for one in arrivals}))}
        self._executor = SimulatedExecutor(
            setup.cost,
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            max_model_len=max(one.prompt_len + one.output_len for one in arrivals),
        )
        config = ResolvedEngine(
            model=ModelConfig(path="simulated"),
            cache=CacheConfig(events=False),  # Nobody follows it.
            scheduler=setup.scheduler,
            runtime=ResolvedRuntime(step_timeout_s=1.0),  # A simulated device never hangs.
        )
        self._engine = Engine(config, self._executor, plans_in_flight=_PLANS_IN_FLIGHT, clock=self._executor.clock)

    def run(self) -> Outcome:
        """Until every request has ended."""
        while self._coming or self._engine.has_work:
            self._take_arrivals()
            self._delay()
            before = self._executor.now
            for delta in self._engine.step():
                self._served[int(delta.request_id)].take(delta, self._executor.now)
            if self._executor.now == before:
                self._skip_idle_time()
        stats = self._engine.stats()
        hit_rate = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        self._engine.shutdown()
        return Outcome(self._served, self._executor.now, stats.num_preemptions, hit_rate)

    def _delay(self) -> None:
        """The next step waits for requests as long as a server's does."""
        while (delay := self._engine.delay_s) > 0:
            until = self._executor.now + delay
            if not self._coming or self._served[self._coming[0]].arrival.at > until:
                self._executor.now = until
                return
            self._executor.now = self._served[self._coming[0]].arrival.at
            self._take_arrivals()

    def _take_arrivals(self) -> None:
        while self._coming and self._served[self._coming[0]].arrival.at <= self._executor.now:
            index = self._coming.popleft()
            try:
                self._add(index, self._served[index].arrival)
            except Overloaded:
                self._served[index].end = "refused"

    def _add(self, index: int, arrival: Arrival) -> None:
        own = arrival.prompt_len - arrival.num_shared
        self._engine.add(
            [str(index)],
            [self._tenants[arrival.tenant]] * arrival.num_shared + [_OWN_TOKENS + index] * own,
            SamplingParams(temperature=0.0, seed=0, max_tokens=arrival.output_len, ignore_eos=True),
            RequestOptions(tenant=arrival.tenant, priority=arrival.priority, deadline_s=self._deadline_s),
        )

    def _skip_idle_time(self) -> None:
        """Nothing ran: go on at the next arrival."""
        if self._coming:
            self._executor.now = max(self._executor.now, self._served[self._coming[0]].arrival.at)
        elif self._engine.has_work:
            raise RuntimeError(f"at {self._executor.now:.3f} s requests wait, but the engine plans no step")
