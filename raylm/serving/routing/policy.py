"""Which of several engines a request goes to, from what is known of each: no clock, no I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from raylm.config.routing import RoutingConfig

Reason = Literal["only", "affinity", "prefix", "load", "round_robin", "power_of_two"]


class Candidate(NamedTuple):
    """One engine that could take the request.

    num_tokens: prompt tokens that wait there. num_sequences: what runs or waits there. matched: tokens of the request's
    prompt that are in its cache.
    """

    engine_id: str
    num_tokens: int
    num_sequences: int
    matched: int = 0


class Request(NamedTuple):
    """What is known of the request: its prompt's length, its session, and a name for the part of the prompt that no
    engine has."""

    num_tokens: int
    session: str = ""
    part: bytes = b""


class Picked(NamedTuple):
    """The number of a candidate, and why it is that one."""

    at: int
    reason: Reason


class Policy:
    """Picks one of the candidates. Ingresses with equal views pick alike, without a word between them."""

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config
        self._turn = 0
        self._random = random.Random()

    def pick(self, candidates: Sequence[Candidate], request: Request) -> Picked:
        """There is at least one candidate."""
        if len(candidates) == 1:
            return Picked(0, "only")
        if self._config.policy == "round_robin":
            self._turn += 1
            return Picked(self._turn % len(candidates), "round_robin")
        works = [self.work(each) for each in candidates]
        if self._config.policy == "power_of_two":
            first, second = self._random.sample(range(len(candidates)), 2)
            return Picked(first if works[first] <= works[second] else second, "power_of_two")
        free = self.not_overloaded(candidates)
        if request.session:
            favourite = max(range(len(candidates)), key=lambda at: _rank(candidates[at], request.session.encode()))
            if favourite in free:
                return Picked(favourite, "affinity")
        return self._cheapest(candidates, works, free, request)

    def work(self, candidate: Candidate) -> float:
        """How much an engine has to do, in prompt tokens."""
        return candidate.num_tokens + self._config.sequence_tokens * candidate.num_sequences

    def not_overloaded(self, candidates: Sequence[Candidate]) -> list[int]:
        """Those that would not have much more to do than the mean with one more request; all where each has too much
        of something."""
        config, count = self._config, len(candidates)
        sequences = (1 + sum(each.num_sequences for each in candidates)) / count
        tokens = sum(each.num_tokens for each in candidates) / count
        most_sequences = max(config.max_imbalance * sequences, sequences + config.slack_sequences)
        most_tokens = max(config.max_imbalance * tokens, tokens + config.slack_tokens)
        free = [
            at
            for at, each in enumerate(candidates)
            if each.num_sequences + 1 <= most_sequences and each.num_tokens <= most_tokens
        ]
        return free or list(range(count))

    def _cheapest(
        self, candidates: Sequence[Candidate], works: Sequence[float], free: list[int], request: Request
    ) -> Picked:
        """Where what is to be done before the request's first token, and for it, is least. Of those that are about
        equal, the request's own prompt decides, so that others with the same one follow it from every ingress."""
        by_prefix = self._config.policy == "prefix"
        weight = self._config.prefix_weight if by_prefix else 0.0
        costs = {at: works[at] - weight * candidates[at].matched for at in free}
        least = min(costs.values())
        about = [at for at in free if costs[at] <= least + self._config.sequence_tokens / 2]
        if by_prefix:
            chosen = max(about, key=lambda at: _rank(candidates[at], request.part))
        else:
            chosen = min(costs, key=lambda at: costs[at])
        helped = by_prefix and candidates[chosen].matched > min(candidates[at].matched for at in free)
        return Picked(chosen, "prefix" if helped else "load")


def _rank(candidate: Candidate, name: bytes) -> int:
    """The engine with the greatest rank is a name's own: rendezvous hashing, by which few names move when an engine
    comes or goes."""
    return xxh3_64_intdigest(name + b"\0" + candidate.engine_id.encode())
