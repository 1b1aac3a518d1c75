"""The order in which waiting requests are admitted."""

from __future__ import annotations

from collections import OrderedDict

from raylm.core.request import Request


class FCFSQueue:
    """First come, first served; a preempted request goes back to the front. Every call is O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.id] = request

    def put_back(self, request: Request) -> None:
        """Queue a preempted request before all others."""
        self._requests[request.id] = request
        self._requests.move_to_end(request.id, last=False)

    def first(self) -> Request | None:
        """The request to admit next; it stays in the queue."""
        return next(iter(self._requests.values()), None)

    def remove(self, request: Request) -> None:
        del self._requests[request.id]
