"""What routing costs a request, and what a policy does with conversations on a simulated cluster."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import NamedTuple

from raylm.config.base import parse
from raylm.config.resolve import ResolvedScheduler
from raylm.config.routing import RoutePolicy, RoutingConfig
from raylm.core.block_hash import HASHES, PrefixForm, chain
from raylm.core.events import BlockEvent, EventSnapshot
from raylm.engine.backlog import Backlog
from raylm.serving.routing.cluster import Cluster, ClusterOutcome, ClusterSetup, Sample
from raylm.serving.routing.selector import EngineView, Prompt, Selector
from raylm.sim.cost import PRESETS, DeviceCost
from raylm.sim.sessions import SessionKind, make_sessions

_REPEATS = 300
_APART_S = 0.1
"""Between two requests where a choice's cost is measured: after 300, each has what an earlier one expected expire."""
_SETTLING_S = 30.0
"""Conversations begin at time 0: until then there are fewer of them than later."""


@dataclass(frozen=True, slots=True)
class ChoiceCost:
    """Microseconds of one choice: of a prompt that every engine has, and of one that none has."""

    engines: int
    prompt_tokens: int
    cached_us_p50: float
    cached_us_p99: float
    new_us_p50: float
    new_us_p99: float


_MAX_ROWS = 256
_UNEVEN = 1.25


class Balance(NamedTuple):
    """How even the engines' load is, of samples ten times a second. A free engine is one where nobody waits and another
    sequence finds room.

    mean_sequences: running and waiting at an engine. The others are shares of the samples. imbalanced: an engine has
    more than 1.25 times the mean of sequences, and at least one more than the mean. tokens_imbalanced: an engine has
    more than 1.25 times the mean of tokens of its running and waiting sequences while another one is free.
    queued_beside_free: the same, and requests wait at that engine.
    """

    mean_sequences: float
    imbalanced: float
    tokens_imbalanced: float
    queued_beside_free: float


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy. hit_rate: share of prompt tokens found in the cache of the engine that got them. The last four are
    those of Balance. Times in milliseconds."""

    policy: str
    replicas: int
    ingresses: int
    sessions_named: bool
    requests: int
    hit_rate: float
    ttft_ms_p50: float
    ttft_ms_p90: float
    ttft_ms_p99: float
    mean_sequences: float
    imbalanced: float
    tokens_imbalanced: float
    queued_beside_free: float


def cost_of_a_choice(num_engines: int, num_tokens: int) -> ChoiceCost:
    """On this machine, in this process."""
    rng = random.Random(0)
    config, form = RoutingConfig(), PrefixForm("model", 16, "xxhash", 0)
    views = [EngineView(f"engine-{number}", Backlog(), form, config) for number in range(num_engines)]
    prompt = rng.choices(range(100_000), k=num_tokens)
    root = form.root(adapter="", salt="", epoch=0)
    hashes = chain(prompt, root, block_size=16, hash_of=HASHES["xxhash"])
    for view in views:
        assert view.index is not None
        view.index.apply(EventSnapshot(0, [BlockEvent("stored", each, root, 16, 0) for each in hashes]))
    clock = itertools.count(step=_APART_S / 2)  # A choice looks at it twice.
    selector = Selector(config, clock=lambda: next(clock))
    cached = [_microseconds(selector, views, prompt) for _ in range(_REPEATS)]
    new = [_microseconds(selector, views, rng.choices(range(100_000), k=num_tokens)) for _ in range(2 * _REPEATS)]
    at = [quantiles(times, n=100) for times in (cached, new[_REPEATS:])]
    return ChoiceCost(num_engines, num_tokens, at[0][49], at[0][98], at[1][49], at[1][98])


def _microseconds(selector: Selector, views: list[EngineView], prompt: list[int]) -> float:
    begun = time.perf_counter()
    selector.select(views, Prompt(prompt))
    return (time.perf_counter() - begun) * 1e6


def measure_policy(
    policy: RoutePolicy,
    *,
    replicas: int,
    ingresses: int = 1,
    num_blocks: int,
    rate: float,
    sessions: int,
    named: bool = False,
    speed: float = 1.0,
    routing: RoutingConfig | None = None,
) -> PolicyResult:
    """Conversations, `rate` new ones a second, on engines of an H200 and an 8B model with `num_blocks` blocks each,
    `speed` times as fast. `routing`: all but the policy."""
    scheduler = parse(
        ResolvedScheduler,
        {"max_num_seqs": _MAX_ROWS, "max_num_batched_tokens": 8192},
        source="raylm bench routing",
    )
    cost = DeviceCost(*(seconds / speed for seconds in PRESETS["h200-8b"]))
    config = (routing or RoutingConfig()).model_copy(update={"policy": policy})
    setup = ClusterSetup(scheduler, cost, num_blocks, config, replicas, ingresses, with_sessions=named)
    outcome = Cluster(make_sessions(SessionKind(), rate=rate, sessions=sessions, seed=1), setup).run()
    ttft = quantiles([turn.ttft * 1e3 for turn in outcome.turns if turn.ttft is not None], n=100)
    return PolicyResult(
        policy, replicas, ingresses, named, len(outcome.turns), outcome.hit_rate, ttft[49], ttft[89], ttft[98],
        *_steady_balance(outcome, until=sessions / rate),
    )  # fmt: skip


def _steady_balance(outcome: ClusterOutcome, *, until: float) -> Balance:
    """While the load is steady."""
    begin = min(_SETTLING_S, until / 2)
    return balance([each for number, each in enumerate(outcome.samples) if begin < number / 10 < until])


def balance(samples: Sequence[Sample], *, max_sequences: int = _MAX_ROWS) -> Balance:
    """`max_sequences`: what an engine runs at a time."""
    mean_sequences = 0.0
    counts = [0, 0, 0]
    for live, waiting, tokens in samples:
        mean, mean_tokens = sum(live) / len(live), sum(tokens) / len(tokens)
        mean_sequences += mean
        is_free = [not waits and has < max_sequences for has, waits in zip(live, waiting, strict=True)]
        above = [at for at, has in enumerate(tokens) if has > _UNEVEN * mean_tokens]
        beside_free = [at for at in above if any(free for other, free in enumerate(is_free) if other != at)]
        counts[0] += max(live) > _UNEVEN * mean and max(live) - mean >= 1
        counts[1] += bool(beside_free)
        counts[2] += any(waiting[at] for at in beside_free)
    num_samples = max(len(samples), 1)
    return Balance(mean_sequences / num_samples, *(count / num_samples for count in counts))
