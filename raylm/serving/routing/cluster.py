"""Several engines on one simulated clock behind the real selector: what a routing policy does with conversations."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from raylm.config.engine import CacheConfig, ModelConfig
from raylm.config.resolve import ResolvedEngine, ResolvedRuntime, ResolvedScheduler
from raylm.config.routing import RoutingConfig
from raylm.core.load import Load
from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.engine.backlog import Backlog
from raylm.engine.engine import Engine
from raylm.errors import Overloaded
from raylm.serving.routing.selector import EngineView, Prompt, Selector
from raylm.sim.cost import DeviceCost
from raylm.sim.executor import SimulatedExecutor
from raylm.sim.sessions import Session

_PLANS_IN_FLIGHT = 2
_MAX_MODEL_LEN = 1 << 16
_SAMPLE_S = 0.1
_TELL_S = 0.1
"""How often an engine tells its load to an ingress that has nothing there."""


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """The simulated cluster. `delay_s`: from an engine's step until an ingress knows of it. `with_sessions`: requests
    name their conversation."""

    scheduler: ResolvedScheduler
    cost: DeviceCost
    num_blocks: int
    routing: RoutingConfig
    replicas: int = 4
    ingresses: int = 1
    delay_s: float = 0.002
    block_size: int = 16
    with_sessions: bool = False


class Turn(NamedTuple):
    """What became of one request: seconds to its first token, or None where it was refused."""

    at: float
    ttft: float | None
    prompt_tokens: int


class Sample(NamedTuple):
    """All engines at one time, ten times a second: sequences of each, how many of them wait, and the tokens of all of
    them, prompts and what was answered so far."""

    live: list[int]
    waiting: list[int]
    tokens: list[int]


@dataclass(slots=True)
class ClusterOutcome:
    turns: list[Turn] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were in the cache of the engine that got them."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class _Replica:
    """One engine with a clock of its own, which is at the end of its last step."""

    def __init__(self, number: int, setup: ClusterSetup) -> None:
        self.engine_id = f"engine-{number}"
        self.executor = SimulatedExecutor(
            setup.cost, num_blocks=setup.num_blocks, block_size=setup.block_size, max_model_len=_MAX_MODEL_LEN
        )
        config = ResolvedEngine(
            model=ModelConfig(path="simulated"),
            cache=CacheConfig(block_size=setup.block_size, events=True),
            scheduler=setup.scheduler,
            runtime=ResolvedRuntime(step_timeout_s=1.0),
        )
        self.engine = Engine(config, self.executor, plans_in_flight=_PLANS_IN_FLIGHT, clock=self.executor.clock)


class _Ingress:
    """A selector, and what reaches it of each engine, late."""

    def __init__(self, replicas: Sequence[_Replica], setup: ClusterSetup) -> None:
        self._now = 0.0
        self._delay_s = setup.delay_s
        self.selector = Selector(setup.routing, clock=lambda: self._now)
        self.views = [
            EngineView(replica.engine_id, Backlog(), replica.engine.prefix_form, setup.routing) for replica in replicas
        ]
        self._coming: list[deque[tuple[float, Callable[[], None]]]] = [deque() for _ in replicas]
        self._told = [0.0] * len(replicas)
        self.live = [0] * len(replicas)

    def hear(self, number: int, at: float, what: Callable[[], None]) -> None:
        self._coming[number].append((at + self._delay_s, what))

    def hear_load(self, number: int, at: float, load: Load) -> None:
        if self.live[number] or at - self._told[number] >= _TELL_S:
            self._told[number] = at
            self.hear(number, at, partial(self.views[number].backlog.report, load))

    def catch_up(self, now: float) -> None:
        """Take in what has come by now."""
        self._now = now
        for coming in self._coming:
            while coming and coming[0][0] <= now:
                coming.popleft()[1]()


@dataclass(slots=True)
class _Live:
    session: Session
    at: float
    prompt_tokens: int
    replica: int
    ingress: int
    has_begun: bool = False
    num_answered: int = 0


class Cluster:
    """Runs conversations until all are over. A question comes some time after the answer before it, through any of the
    ingresses."""

    def __init__(self, sessions: Sequence[Session], setup: ClusterSetup, *, seed: int = 0) -> None:
        self._setup = setup
        self._replicas = [_Replica(number, setup) for number in range(setup.replicas)]
        self._ingresses = [_Ingress(self._replicas, setup) for _ in range(setup.ingresses)]
        self._coming: list[tuple[float, int, Session]] = [(one.at, one.number, one) for one in sessions]
        heapq.heapify(self._coming)
        self._live: dict[str, _Live] = {}
        self._random = random.Random(seed)
        self._outcome = ClusterOutcome()
        self._tokens = [0] * setup.replicas
        self._next_sample = 0.0
        self._num_asked = 0

    def run(self) -> ClusterOutcome:
        outcome = self._outcome
        while True:
            busy = [number for number, one in enumerate(self._replicas) if one.engine.has_work]
            number = min(busy, key=lambda each: self._replicas[each].executor.now, default=None)
            now = None if number is None else self._replicas[number].executor.now
            if self._coming and (now is None or self._coming[0][0] <= now):
                at, _, session = heapq.heappop(self._coming)
                self._sample(at)
                self._ask(session, at)
            elif number is not None:
                assert now is not None
                self._sample(now)
                self._step(number)
            else:
                break
        for ingress in self._ingresses:
            for reason, count in ingress.selector.counts.by_reason.items():
                outcome.reasons[reason] = outcome.reasons.get(reason, 0) + count
        for replica in self._replicas:
            stats = replica.engine.stats()
            outcome.prompt_tokens += stats.prefix_queries
            outcome.cached_tokens += stats.prefix_hits
            outcome.seconds = max(outcome.seconds, replica.executor.now)
            replica.engine.shutdown()
        return outcome

    def _ask(self, session: Session, now: float) -> None:
        prompt_ids, answer = session.ask()
        at_ingress = self._random.randrange(len(self._ingresses))
        ingress = self._ingresses[at_ingress]
        ingress.catch_up(now)
        name = f"session-{session.number}" if self._setup.with_sessions else ""
        chosen = ingress.selector.select(ingress.views, Prompt(prompt_ids, session=name))
        replica = self._replicas[chosen.at]
        if not replica.engine.has_work:
            replica.executor.now = max(replica.executor.now, now)
        self._num_asked += 1
        request_id = str(self._num_asked)
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=answer, ignore_eos=True)
        try:
            replica.engine.add([request_id], prompt_ids, params, RequestOptions())
        except Overloaded:
            self._outcome.turns.append(Turn(now, None, len(prompt_ids)))
            return
        backlog = ingress.views[chosen.at].backlog
        backlog.send(request_id, len(prompt_ids) - chosen.matched_tokens, 1)
        ingress.hear(chosen.at, replica.executor.now, partial(backlog.take, request_id))
        ingress.live[chosen.at] += 1
        self._live[request_id] = _Live(session, now, len(prompt_ids), chosen.at, at_ingress)
        self._tokens[chosen.at] += len(prompt_ids)

    def _step(self, number: int) -> None:
        replica = self._replicas[number]
        deltas = replica.engine.step()
        now = replica.executor.now
        load = replica.engine.stats()
        batch = replica.engine.take_events()
        for ingress in self._ingresses:
            ingress.hear_load(number, now, load)
            index = ingress.views[number].index
            if batch is not None and index is not None:
                ingress.hear(number, now, partial(index.apply, batch))
        for delta in deltas:
            self._take(delta.request_id, delta.token_ids, delta.finish_reason is not None, now)

    def _take(self, request_id: str, token_ids: list[int], has_ended: bool, now: float) -> None:
        live = self._live[request_id]
        if not live.has_begun and token_ids:
            live.has_begun = True
            self._outcome.turns.append(Turn(live.at, now - live.at, live.prompt_tokens))
        live.session.answered += token_ids
        live.num_answered += len(token_ids)
        self._tokens[live.replica] += len(token_ids)
        if has_ended:
            del self._live[request_id]
            self._tokens[live.replica] -= live.prompt_tokens + live.num_answered
            self._ingresses[live.ingress].live[live.replica] -= 1
            session = live.session
            if not session.is_over:
                pause = session.pauses[session.turn - 1]
                heapq.heappush(self._coming, (now + pause, session.number, session))

    def _sample(self, now: float) -> None:
        while self._next_sample <= now:
            loads = [replica.engine.stats() for replica in self._replicas]
            self._outcome.samples.append(
                Sample(
                    [load.running + load.waiting for load in loads],
                    [load.waiting for load in loads],
                    self._tokens.copy(),
                )
            )
            self._next_sample += _SAMPLE_S
