"""Requests on their way into an engine of this process, which refuses more than its queue holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.engine.engine import Engine

_STEPS_AHEAD = 4
"""Steps for which prompts wait in the engine while more of them are there to add."""
_NO_OPTIONS = RequestOptions()


class Group(NamedTuple):
    """The sequences of one prompt, which go to the engine together."""

    ids: list[str]
    prompt_ids: list[int]
    params: SamplingParams
    options: RequestOptions = _NO_OPTIONS


class Feeder:
    """Keeps groups until the engine's queue has room, first come first served."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._limits = engine.limits
        self._todo: deque[Group] = deque()
        self._num_todo = 0
        """Sequences of the groups that wait here."""
        self._num_tokens = 0
        """Tokens of their prompts."""

    @property
    def is_empty(self) -> bool:
        return not self._todo

    def put(self, group: Group) -> None:
        self._todo.append(group)
        self._count(group, 1)

    def ready(self) -> Iterator[Group]:
        """The groups that the engine has room for now; each must be added to it before the next is asked for."""
        # No more at a time than the next steps can use: the device computes while the rest are added.
        enough = _STEPS_AHEAD * self._limits.max_num_batched_tokens
        while self._todo and self._engine.stats().waiting_tokens < enough and self._has_room(self._todo[0]):
            group = self._todo.popleft()
            self._count(group, -1)
            yield group
        self._engine.announce(self._num_todo, self._num_tokens)

    def drop(self, request_id: str) -> None:
        """Forget the group of this sequence, if it is still here."""
        for group in [group for group in self._todo if request_id in group.ids]:
            self._todo.remove(group)
            self._count(group, -1)
        self._engine.announce(self._num_todo, self._num_tokens)

    def _count(self, group: Group, sign: int) -> None:
        self._num_todo += sign * len(group.ids)
        self._num_tokens += sign * len(group.prompt_ids)

    def _has_room(self, group: Group) -> bool:
        stats = self._engine.stats()
        if not stats.waiting:
            return True  # What does not fit now never will, and the engine says so.
        tokens = stats.waiting_tokens + len(group.ids) * len(group.prompt_ids)
        most = self._limits.max_queued_tokens
        return stats.waiting + len(group.ids) <= self._limits.max_queued_requests and (most is None or tokens <= most)
