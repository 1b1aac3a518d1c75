"""How long a step may take before its workers count as hung."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_KEPT = 64
_SIMILAR = 16
"""A step says something of one with at most so many times its tokens."""
_SLACK = 3.0
"""How much longer than that it may take: attention over a longer prompt, a machine that is busy."""


class _Step(NamedTuple):
    num_tokens: int
    seconds: float


class Patience:
    """A limit for the step in hand: the configured one, or more where steps of its kind were seen to need it.

    A device takes at most in proportion longer for more tokens, so a step of n tokens that took s seconds lets one of m
    tokens take m / n times s, with some slack. What a first step needs besides (loading kernels, capturing a graph:
    tens of milliseconds) is far below any configured limit.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._under_way: deque[_Step] = deque()
        """Each with the time at which it was sent in the place of seconds."""
        self._seen: deque[_Step] = deque(maxlen=_KEPT)
        self._answered_at = 0.0

    def sent(self, num_tokens: int, now: float) -> None:
        self._under_way.append(_Step(max(num_tokens, 1), now))

    def answered(self, now: float) -> None:
        """The oldest step under way has ended."""
        step = self._under_way.popleft()
        # It began when the one before it had ended, at the earliest.
        self._seen.append(_Step(step.num_tokens, now - max(step.seconds, self._answered_at)))
        self._answered_at = now

    def resumed(self, now: float) -> None:
        """The workers did something else until now: that counts for no step."""
        self._answered_at = now

    @property
    def limit_s(self) -> float:
        """What the oldest step under way may take from when it is waited for. Read by any thread."""
        steps = list(self._under_way)
        if not steps:
            return self._least_s
        num_tokens = steps[0].num_tokens
        similar = [
            seen.seconds * max(num_tokens / seen.num_tokens, 1.0)
            for seen in list(self._seen)
            if seen.num_tokens * _SIMILAR >= num_tokens
        ]
        return max(self._least_s, _SLACK * max(similar, default=0.0))
