"""Whether a request can be served in time: refused at once where it cannot, ended when its time is up."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from raylm.config.resolve import ResolvedScheduler
from raylm.core.pacing import StepCost
from raylm.core.request import Request, Status
from raylm.errors import Overloaded

_MEMORY_S = 30.0
"""Seconds of work after which what was measured counts 1/e. Idle time does not count."""
_COST_MEMORY = 0.99
_LEAST_SECONDS = 1.0
_LEAST_COUNT = 3.0
"""How much must have been measured recently (seconds of a queue, steps or requests) before a rate says anything."""
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_UNKNOWN_OUTPUT = 128
"""Tokens that a request generates, where none has ended yet."""
_PURGE_AT_LEAST = 64


class Admission:
    """Refuses requests that find no room or cannot be done in time, and finds those whose time is up.

    What it predicts rests on recent measurements alone: where nothing was measured, nothing is refused for it. It
    predicts with recent means, and counts nothing that it does not know. An empty queue never counts as a
    wait, and an idle engine refuses nobody: somebody always gets in, so that what is measured stays true. With another
    policy than fcfs a newcomer may go before those who wait, so its wait counts as none.
    """

    def __init__(self, config: ResolvedScheduler) -> None:
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._max_running = config.max_num_seqs
        self._in_order = config.policy == "fcfs"
        self._max_wait = config.max_queue_s if self._in_order else None
        self._rates = _Rates()
        self._places = _Places()
        self._limits = _TimeLimits()

    def observe(self, prompt_tokens: int, output_tokens: int, seconds: float, num_waiting: int) -> None:
        """Say what a step computed and sampled, how long it took, and how many requests wait when it is done."""
        self._rates.observe(prompt_tokens, output_tokens, seconds, num_waiting)

    def started(self, request: Request) -> None:
        """A newcomer leaves the queue."""
        self._rates.started(request.num_prompt)

    def finished(self, request: Request) -> None:
        """A request came to its own end, by a stop token or by length."""
        self._rates.finished(len(request.token_ids) - request.num_prompt)

    def check(
        self,
        request: Request,
        *,
        num_cached: int,
        num_running: int,
        num_waiting: int,
        waiting_tokens: int,
        now: float,
    ) -> None:
        """Raise Overloaded when a newcomer has no room or not enough time beside those who run and behind the newcomers
        who wait, with so many prompt tokens. `num_cached` tokens of its own prompt need not be computed."""
        self._check_room(request, num_waiting, waiting_tokens, now)
        has_limit = request.queue_deadline < math.inf or request.deadline < math.inf
        if not (num_running or num_waiting) or not (has_limit or self._max_wait):
            return
        wait = self._wait(num_running, num_waiting, waiting_tokens) if self._in_order else 0.0
        if self._max_wait is not None:
            # By what a place takes: a flood begins faster than the queue's own rate can be measured.
            place_s = self._rates.seconds_a_place(request, self._max_running)
            is_full = num_running >= self._max_running
            self._check_wait(num_waiting * place_s if is_full else wait, place_s, self._max_wait, num_waiting, now)
        if has_limit:
            self._check_time(request, request.num_prompt - num_cached, wait, num_waiting, now)

    def queue_s(self, num_running: int, num_waiting: int, waiting_tokens: int) -> float:
        """Seconds until those who wait have left the queue; 0 where nothing was measured yet."""
        return self._wait(num_running, num_waiting, waiting_tokens) if num_waiting else 0.0

    def watch(self, request: Request) -> None:
        """Let due() name the request when its deadline or its time in the queue is up."""
        self._limits.watch(request)

    def due(self, now: float) -> list[Request]:
        """The requests whose time is up, each named once: past their deadline, or past their queue deadline and never
        run, with the forks that wait for them."""
        return self._limits.due(now)

    def _check_room(self, request: Request, num_waiting: int, waiting_tokens: int, now: float) -> None:
        if num_waiting >= self._max_requests:
            place_s = self._rates.seconds_a_place(request, self._max_running)
            raise Overloaded(
                f"{num_waiting} requests are waiting, at most {self._max_requests} may",
                retry_after=self._places.promise(
                    now, place_s, (num_waiting + 1 - self._max_requests) * place_s, num_waiting * place_s
                ),
            )
        # A longer prompt gets in when nobody waits: it would never get in otherwise.
        if self._max_tokens and waiting_tokens and waiting_tokens + request.num_prompt > self._max_tokens:
            token_s = self._rates.seconds_a_token
            excess = waiting_tokens + request.num_prompt - self._max_tokens
            raise Overloaded(
                f"{waiting_tokens} prompt tokens are waiting; with this request's {request.num_prompt} they pass "
                f"max_queued_tokens {self._max_tokens}",
                retry_after=self._places.promise(
                    now, request.num_prompt * token_s, excess * token_s, waiting_tokens * token_s
                ),
            )

    def _check_wait(self, wait: float, place_s: float, most: float, num_waiting: int, now: float) -> None:
        if wait > most:
            raise Overloaded(
                f"{wait:.2f} s in the queue are predicted, behind {num_waiting} requests; "
                f"max_queue_s allows {most:g} s",
                retry_after=self._places.promise(now, place_s, wait - most, wait),
            )

    def _check_time(self, request: Request, num_prefill: int, wait: float, num_waiting: int, now: float) -> None:
        over = now + wait - request.queue_deadline
        if over > 0:
            raise Overloaded(
                f"queue_timeout_s is {request.options.queue_timeout_s:g}, but {wait:.2f} s in the queue are predicted, "
                f"behind {num_waiting} requests",
                retry_after=max(over, _MIN_RETRY_S),
            )
        prefill, num_output, decode = self._rates.service(request, num_prefill)
        total = wait + prefill + decode
        over = now + total - request.deadline
        if over > 0:
            raise Overloaded(
                f"deadline_s is {request.options.deadline_s:g}, but {total:.2f} s are predicted: {wait:.2f} s in the "
                f"queue behind {num_waiting} requests, {prefill:.2f} s for {num_prefill} prompt tokens, "
                f"{decode:.2f} s for {num_output:.0f} output tokens",
                retry_after=max(min(over, wait), _MIN_RETRY_S),
            )

    def _wait(self, num_running: int, num_waiting: int, waiting_tokens: int) -> float:
        """Seconds until those who wait have left the queue. While all rows are taken it moves by requests, each for one
        that ends; otherwise by their tokens."""
        if num_running >= self._max_running:
            return _time(num_waiting, self._rates.requests_per_s)
        return _time(waiting_tokens, self._rates.tokens_per_s)


class _Places:
    """When those who were refused may come back: one after the other, as places in the queue become free.

    All told the same time would come back at once, and all but one be refused again. Nobody is told more than the whole
    queue's wait: who knows whether those told before will come.
    """

    def __init__(self) -> None:
        self._promised = -math.inf
        """When the last place that was promised is free."""

    def promise(self, now: float, own_s: float, first_s: float, queue_s: float) -> float:
        """Seconds until there is a place beyond those promised. A place takes `own_s` to become free; the first does in
        `first_s`, the last request in the queue leaves it in `queue_s`."""
        latest = now + min(max(queue_s, first_s), _MAX_RETRY_S)
        self._promised = min(max(now + first_s, self._promised + own_s), latest)
        return max(self._promised - now, _MIN_RETRY_S)


class _Ratio:
    """A sum over another, both fading; None while the lower one is less than `least`."""

    __slots__ = ("_amount", "_least", "_per")

    def __init__(self, least: float) -> None:
        self._least = least
        self._amount = 0.0
        self._per = 0.0

    def add(self, amount: float, per: float) -> None:
        self._amount += amount
        self._per += per

    def fade(self, factor: float) -> None:
        self._amount *= factor
        self._per *= factor

    @property
    def value(self) -> float | None:
        return self._amount / self._per if self._per >= self._least else None


class _Rates:
    """What was measured, weighted exponentially over recent seconds of work.

    How fast the queue moves shows only while there is one: seconds count when requests still wait after a step, and a
    request counts when some waited before it started (which errs on the fast side, at both ends of a queue). Prompt
    tokens count by requests that leave, so that what the prefix cache saves is in the rate.
    """

    def __init__(self) -> None:
        self._requests = _Ratio(_LEAST_SECONDS)
        self._tokens = _Ratio(_LEAST_SECONDS)
        self._itl = _Ratio(_LEAST_COUNT)
        self._outputs = _Ratio(_LEAST_COUNT)
        self._cost = StepCost(_COST_MEMORY)
        self._had_queue = False

    @property
    def requests_per_s(self) -> float | None:
        """Requests that leave the queue."""
        return self._requests.value

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens of the requests that leave the queue."""
        return self._tokens.value

    @property
    def seconds_a_token(self) -> float:
        """Seconds in which one prompt token leaves the queue, or is computed where that was not measured."""
        rate = self.tokens_per_s
        return 1 / rate if rate else self._cost.slope or 0.0

    def seconds_a_place(self, request: Request, num_rows: int) -> float:
        """Seconds in which one request leaves the queue. Where that was not measured: what one like `request` takes
        beside so many others, by the times of steps; 0 before there were any."""
        rate = self.requests_per_s
        if rate:
            return 1 / rate
        limit = request.max_len - request.num_prompt
        num_output = min(self._outputs.value or _UNKNOWN_OUTPUT, limit)
        return request.num_prompt * (self._cost.slope or 0.0) + num_output * (self._itl.value or 0.0) / num_rows

    def observe(self, prompt_tokens: int, output_tokens: int, seconds: float, num_waiting: int) -> None:
        factor = math.exp(-seconds / _MEMORY_S)
        for ratio in (self._requests, self._tokens, self._itl, self._outputs):
            ratio.fade(factor)
        self._had_queue = num_waiting > 0
        if num_waiting:
            self._requests.add(0, seconds)
            self._tokens.add(0, seconds)
        if output_tokens:
            self._itl.add(seconds, 1)
        self._cost.observe(prompt_tokens + output_tokens, seconds)

    def started(self, num_prompt: int) -> None:
        if self._had_queue:
            self._requests.add(1, 0)
            self._tokens.add(num_prompt, 0)

    def finished(self, num_output: int) -> None:
        self._outputs.add(num_output, 1)

    def service(self, request: Request, num_prefill: int) -> tuple[float, float, float]:
        """Seconds for the prompt, output tokens, seconds for them; 0 for what is not known."""
        limit = request.max_len - request.num_prompt
        mean = self._outputs.value or 0.0
        num_output = float(limit) if request.params.ignore_eos else min(mean, limit)
        prefill = num_prefill * (self._cost.slope or 0.0)
        return prefill, num_output, num_output * (self._itl.value or 0.0)


class _TimeLimits:
    """A heap of times; O(log n) a request, O(1) a step when nothing is due.

    Requests that ended stay in it until their time, or until it has doubled since they were last swept out.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Request]] = []
        self._num_pushed = 0
        self._sweep_at = _PURGE_AT_LEAST

    def watch(self, request: Request) -> None:
        for time, in_queue in ((request.deadline, False), (request.queue_deadline, True)):
            if time < math.inf:
                self._num_pushed += 1
                heappush(self._heap, (time, self._num_pushed, in_queue, request))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[-1].status is not Status.FINISHED]
            heapify(self._heap)
            self._sweep_at = max(_PURGE_AT_LEAST, 2 * len(self._heap))

    def due(self, now: float) -> list[Request]:
        found: dict[Request, None] = {}
        while self._heap and self._heap[0][0] <= now:
            _, _, in_queue, request = heappop(self._heap)
            if request.status is Status.FINISHED:
                continue
            if not in_queue:
                found[request] = None
            elif request.is_new:
                found[request] = None
                found.update(dict.fromkeys(fork for fork in request.forks if fork.status is not Status.FINISHED))
        return list(found)


def _time(amount: float, rate: float | None) -> float:
    """Seconds for an amount; 0 where the rate is not known."""
    return amount / rate if rate else 0.0


def too_late(request: Request, now: float) -> str:
    """The sentence for a request whose time is up."""
    waited = now - request.arrived
    if now >= request.deadline:
        return f"the request was not complete after deadline_s {request.options.deadline_s:g} (it took {waited:.2f} s)"
    return f"the request waited {waited:.2f} s, longer than queue_timeout_s {request.options.queue_timeout_s:g}"
