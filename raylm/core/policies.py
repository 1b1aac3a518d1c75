"""Who is admitted next, and who gives way first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

from raylm.config.engine import SchedulerConfig
from raylm.core.options import RequestOptions
from raylm.core.request import Request
from raylm.plugins import load_plugin

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""What fair scheduling charges a tenant a token: w_p and w_q of the paper, with its values."""
_PURGE_AT_LEAST = 64


class Policy(Protocol):
    """The waiting requests and the order of service.

    How many requests wait does not change what a step costs.
    """

    counts_tokens: bool
    """Whether served() does anything."""

    def __len__(self) -> int: ...

    def add(self, request: Request) -> None:
        """Queue a newcomer."""

    def put_back(self, request: Request) -> None:
        """Queue a preempted or forked request; it goes before the newcomers of its class."""

    def first(self) -> Request | None:
        """The request to admit next; it stays queued."""

    def remove(self, request: Request) -> None:
        """Take any waiting request out: it is admitted, or has ended. Raises KeyError when it does not wait."""

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """Say what a step gives a request: prompt tokens when they are planned, so that the next first() knows of
        them, and output tokens when they are sampled. What is computed again after a preemption is not said again."""

    def rank(self, request: Request) -> tuple[int, ...]:
        """The place among running requests of one that is admitted now: the greatest gives way first. No two running
        requests have the same. Called once an admission."""


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that `scheduler.policy` names. Raises ConfigError for a plug-in that cannot be loaded."""
    if config.policy == "priority":
        return PriorityPolicy(config.ageing_s)
    if config.policy == "fair":
        return FairPolicy(config.tenant_weights)
    if config.policy == "fcfs":
        return FCFSPolicy()
    make: Callable[[SchedulerConfig], Policy] = load_plugin("raylm.schedulers", config.policy)  # type: ignore[assignment]
    return make(config)


class FCFSPolicy:
    """First come, first served; what was preempted goes to the front. Every call is O(1)."""

    counts_tokens = False

    def __init__(self) -> None:
        self._waiting: OrderedDict[Request, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting[request] = None

    def put_back(self, request: Request) -> None:
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)

    def first(self) -> Request | None:
        return next(iter(self._waiting), None)

    def remove(self, request: Request) -> None:
        del self._waiting[request]

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.order,)


class PriorityPolicy:
    """The lowest `priority` first; a request that has waited `ageing_s` counts as one priority lower.

    Requests age alike, so priority - waited / ageing_s orders them as priority + arrived / ageing_s does, which never
    changes: a heap of that key. What is put back has its old key, and so its place before later ones of its priority.
    Requests taken out leave their entry in the heap until it comes up or such entries are most of it. Every call is
    O(log n), first() and remove() on average over calls.
    """

    counts_tokens = False

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._waiting: dict[Request, None] = {}
        self._heap: list[tuple[float, int, int, Request]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        self._waiting[request] = None
        heappush(self._heap, self._entry(request))
        if len(self._heap) > 2 * len(self._waiting) + _PURGE_AT_LEAST:
            self._heap = [self._entry(waiting) for waiting in self._waiting]
            heapify(self._heap)

    def first(self) -> Request | None:
        while self._heap and self._heap[0][-1] not in self._waiting:
            heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def remove(self, request: Request) -> None:
        del self._waiting[request]

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def rank(self, request: Request) -> tuple[int, ...]:
        return (request.options.priority, request.order)

    def _entry(self, request: Request) -> tuple[float, int, int, Request]:
        self._num_pushed += 1
        key = request.options.priority + request.arrived / self._ageing_s
        return (key, request.order, self._num_pushed, request)


class _Tenant:
    """One tenant's waiting requests in their order, and what it was given: cost over weight."""

    __slots__ = ("counter", "name", "queue", "weight")

    def __init__(self, name: str, weight: float, counter: float) -> None:
        self.name = name
        self.weight = weight
        self.counter = counter
        self.queue: OrderedDict[Request, None] = OrderedDict()


class FairPolicy:
    """The tenant that was given least goes first, each tenant's requests in their order: the weighted Virtual Token
    Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

    A tenant's counter grows by the cost of its tokens over its weight, which is that of its latest request that has
    one, else that of the engine's configuration. When it begins to wait, the counter is lifted to
    the least of those that wait (or, where none does, to that of the last one that did): time away earns nothing.
    While two tenants have requests waiting all the time, what they were given, each over its weight, differs by at most
    2 * max(w_p * L, w_q * M) / (the lesser weight), L being the longest prompt in tokens and M the most tokens that the
    requests running together come to (theorem 4.4 there). Whoever waits is admitted whenever there is room.

    The heap has one entry for every known tenant, with a counter as it was at some time. Counters only grow, so an old
    one errs on the low side, and first() brings the entries that come up to date: served() is O(1), and first(), add()
    and put_back() take O(log tenants) for each tenant served since, however many there are. A tenant that does not
    wait is forgotten once its counter is the least: it would be lifted anyway.
    """

    counts_tokens = True

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[float, int, _Tenant]] = []
        self._last_to_leave: _Tenant | None = None
        self._num_waiting = 0
        self._num_entries = 0
        self._num_admitted = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_tenants(self) -> int:
        """Tenants that it keeps a counter of."""
        return len(self._tenants)

    def add(self, request: Request) -> None:
        self._enqueue(request)

    def put_back(self, request: Request) -> None:
        self._enqueue(request).queue.move_to_end(request, last=False)

    def first(self) -> Request | None:
        tenant = self._least_waiting()
        return next(iter(tenant.queue)) if tenant is not None else None

    def remove(self, request: Request) -> None:
        tenant = self._tenants[request.options.tenant]
        del tenant.queue[request]
        self._num_waiting -= 1
        if not tenant.queue:
            self._last_to_leave = tenant

    def served(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        tenant = self._tenant(request.options)
        tenant.counter += (PROMPT_TOKEN_COST * prompt_tokens + OUTPUT_TOKEN_COST * output_tokens) / tenant.weight

    def rank(self, request: Request) -> tuple[int, ...]:
        self._num_admitted += 1
        return (self._num_admitted,)

    def _enqueue(self, request: Request) -> _Tenant:
        # First the floor: to find it may forget this very tenant.
        floor = self._floor()
        tenant = self._tenant(request.options)
        if request.options.weight is not None:
            tenant.weight = request.options.weight
        if not tenant.queue:
            tenant.counter = max(tenant.counter, floor)
        tenant.queue[request] = None
        self._num_waiting += 1
        return tenant

    def _tenant(self, options: RequestOptions) -> _Tenant:
        name = options.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            # One that was forgotten while its requests ran goes on from where it would be lifted to.
            weight = self._weights.get(name, 1.0) if options.weight is None else options.weight
            tenant = _Tenant(name, weight, self._floor())
            self._tenants[name] = tenant
            self._num_entries += 1
            heappush(self._heap, (tenant.counter, self._num_entries, tenant))
        return tenant

    def _floor(self) -> float:
        tenant = self._least_waiting() or self._last_to_leave
        return tenant.counter if tenant is not None else 0.0

    def _least_waiting(self) -> _Tenant | None:
        while self._num_waiting:
            counter, entry, tenant = self._heap[0]
            if counter < tenant.counter:
                heapreplace(self._heap, (tenant.counter, entry, tenant))
            elif tenant.queue:
                return tenant
            else:
                heappop(self._heap)
                del self._tenants[tenant.name]
        return None
