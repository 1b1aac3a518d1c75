"""What this ingress may give of its tenants' limits, and how it gets more of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from raylm.log import get_logger
from raylm.serving.identity.ledger import Claim, Kind, Ledger, Reply
from raylm.serving.identity.window import Level, Window

logger = get_logger(__name__)

EXCHANGE_EVERY_S = 1.0
_WAIT_S = 0.25
"""How long a request waits for the Directory, where this ingress holds too little of a limit that is not used up."""
_EXCHANGE_S = 2.0
_REFUSED_S = 0.2
"""The Directory is not asked again so soon after it had nothing to give."""

Exchange = Callable[[Sequence[Claim], bool], Awaitable[Reply]]
"""The ledger, wherever it is: claims, and whether they are all."""


class Meter:
    """One limit of one tenant at this ingress."""

    def __init__(self, tenant: str, kind: Kind, limit: int) -> None:
        self.tenant = tenant
        self.kind = kind
        self.limit = limit
        self.used: Window | Level = Level() if kind == "running" else Window()
        self.held = 0
        """What may still be used here without asking."""
        self.others = 0
        """What the other ingresses had used and held when they last said so."""
        self.wanted = 0
        """What requests wait for."""
        self._refused = (0.0, 0)

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.others - self.used.total)

    def spend(self, second: int, amount: int) -> bool:
        """Whether there was so much."""
        if amount > self.held:
            return False
        self.held -= amount
        self.used.add(second, amount)
        return True

    def is_refused(self, now: float, amount: int) -> bool:
        """Whether there was not so much a moment ago."""
        until, refused = self._refused
        return now < until and amount >= refused

    def refuse(self, now: float, amount: int) -> None:
        self._refused = (now + _REFUSED_S, amount)

    def correct(self, second: int, amount: int, actual: int, now: int) -> None:
        """Of what was spent in a second, `actual` was used, less or more."""
        if actual <= amount:
            self.held += self.used.take_back(second, amount - actual)
        else:
            self.used.add(now, actual - amount)
            self.held = max(0, self.held - (actual - amount))

    def wait_s(self, amount: int, second: int) -> int:
        """Seconds after which so much may be there, if all ingresses use their parts at the same pace."""
        missing, all_used = amount - self.remaining, self.others + self.used.total
        own = -(-missing * self.used.total // max(1, all_used))
        return max(1, self.used.wait_for(max(1, own), second))

    def claim(self, second: int, num_ingresses: int) -> Claim:
        """What to tell the ledger. What will not be needed soon is given back, and where little is left nobody keeps
        much of it."""
        self.used.move(second)
        part = -(-self.remaining // (2 * num_ingresses))
        target = max(self.wanted, min(self.used.soon(second), part))
        self.held = min(self.held, target)
        self.wanted = 0
        return Claim(self.tenant, self.kind, self.limit, self.used.total, self.held, target - self.held)


class Shares:
    """All meters of this ingress."""

    def __init__(self, exchange: Exchange | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`exchange`: the ledger of all ingresses; one of its own where this is the only one. `clock` gives seconds."""
        self._exchange = _alone(clock) if exchange is None else exchange
        self._clock = clock
        self._meters: dict[tuple[str, Kind], Meter] = {}
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._asking: list[Meter] = []
        self._is_away = False
        self._num_ingresses = 1

    @property
    def second(self) -> int:
        return int(self._clock())

    def meter(self, tenant: str, kind: Kind, limit: int) -> Meter:
        """The meter of a limit, which goes on with what was used where the limit has changed."""
        meter = self._meters.setdefault((tenant, kind), Meter(tenant, kind, limit))
        if limit < meter.limit:
            meter.held = 0
        meter.limit = limit
        return meter

    async def spend(self, meter: Meter, amount: int) -> bool:
        """Whether the tenant may use so much now. Where this ingress holds too little, the ledger is asked."""
        meter.used.move(self.second)
        if meter.spend(self.second, amount):
            return True
        if amount > meter.limit or meter.is_refused(self._clock(), amount):
            return False
        if not self._is_away:
            meter.wanted += amount
            self._asking.append(meter)
            answered, _ = await asyncio.wait([self._round()], timeout=_WAIT_S)
            if not answered:
                return self._spend_part(meter, amount)
        if self._is_away:
            return self._spend_part(meter, amount)
        if meter.spend(self.second, amount):
            return True
        meter.refuse(self._clock(), amount)
        return False

    async def run(self) -> None:
        """Tell the ledger once a second what is used, for as long as the ingress lives."""
        while True:
            await asyncio.sleep(EXCHANGE_EVERY_S)
            await self.settle()

    async def settle(self) -> None:
        """Tell the ledger of everything."""
        async with self._one_at_a_time:
            second = self.second
            for meter in self._meters.values():
                meter.used.move(second)
            live = [each for each in self._meters.values() if each.used.total or each.held or each.wanted]
            for idle in self._meters.keys() - {(each.tenant, each.kind) for each in live}:
                self._meters[idle].others = 0
            await self._ask(live, all_of_them=True)

    def _round(self) -> asyncio.Task[None]:
        """The next exchange for requests that wait: one that begins after now."""
        if self._next is None:
            self._next = asyncio.create_task(self._run_round())
        return self._next

    async def _run_round(self) -> None:
        async with self._one_at_a_time:
            self._next = None
            meters, self._asking = list(dict.fromkeys(self._asking)), []
            await self._ask(meters, all_of_them=False)

    async def _ask(self, meters: list[Meter], *, all_of_them: bool) -> None:
        claims = [meter.claim(self.second, self._num_ingresses) for meter in meters]
        try:
            reply = await asyncio.wait_for(self._exchange(claims, all_of_them), _EXCHANGE_S)
        except Exception as error:  # Ray's own, whatever is away.
            if not self._is_away:
                logger.warning(
                    "limits of tenants are kept by each ingress for itself, as the Directory is away: %s: %s",
                    type(error).__name__,
                    error,
                )
            self._is_away = True
            return
        self._is_away = False
        self._num_ingresses = reply.num_ingresses
        for meter, grant in zip(meters, reply.grants, strict=True):
            meter.held += grant.extra
            meter.others = grant.others

    def _spend_part(self, meter: Meter, amount: int) -> bool:
        """The ledger is away, or slow: an equal part of the limit is this ingress's."""
        if meter.used.total + amount > meter.limit // self._num_ingresses:
            return False
        meter.used.add(self.second, amount)
        return True


def _alone(clock: Callable[[], float]) -> Exchange:
    ledger = Ledger(clock)

    async def exchange(claims: Sequence[Claim], all_of_them: bool) -> Reply:
        return ledger.exchange("", claims, all_of_them=all_of_them)

    return exchange
