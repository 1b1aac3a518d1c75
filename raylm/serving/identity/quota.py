"""TenantQuota: one tenant's limits at this ingress."""

from __future__ import annotations

from raylm.api.errors import HttpError
from raylm.api.quota import Headers
from raylm.config.tenants import TenantConfig
from raylm.serving.identity.counts import TenantCounts
from raylm.serving.identity.ledger import Kind
from raylm.serving.identity.shares import Meter, Shares

_NAMES: dict[Kind, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "running": "concurrent requests",
}


class TenantQuota:
    """Counts what a tenant asks for, and refuses what is beyond its limits."""

    def __init__(self, tenant: str, limits: TenantConfig, shares: Shares, counts: TenantCounts) -> None:
        self._tenant = tenant
        self._shares = shares
        self._counts = counts
        self._requests = self._meter("requests", limits.requests_per_minute)
        self._tokens = self._meter("tokens", limits.tokens_per_minute)
        self._running = self._meter("running", limits.concurrent_requests)

    async def begin(self) -> None:
        """Count a request. Raises HttpError 429."""
        self._counts.of(self._tenant).requests += 1
        await self._spend(self._requests, 1)

    async def reserve(self, num_tokens: int) -> _Hold:
        """Let a request run that may use so many tokens. Raises HttpError 429."""
        await self._spend(self._running, 1)
        second = self._shares.second
        try:
            await self._spend(self._tokens, num_tokens)
        except BaseException:
            if self._running is not None:
                self._running.correct(second, 1, 0, second)
            raise
        return _Hold(self._tenant, self._shares, self._counts, self._running, self._tokens, num_tokens)

    def headers(self) -> Headers:
        """OpenAI's: limit, remaining and reset of requests and tokens, where there are limits."""
        second = self._shares.second
        found: list[tuple[bytes, bytes]] = []
        for name, meter in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if meter is None:
                continue
            meter.used.move(second)
            # Where others have used it nothing is known here but that it is over after a minute.
            reset = meter.used.until_free(second) or (60 if meter.others else 0)
            found += [
                (b"x-ratelimit-limit-" + name, b"%d" % meter.limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % meter.remaining),
                (b"x-ratelimit-reset-" + name, _duration(reset)),
            ]
        return tuple(found)

    def _meter(self, kind: Kind, limit: int | None) -> Meter | None:
        return None if limit is None else self._shares.meter(self._tenant, kind, limit)

    async def _spend(self, meter: Meter | None, amount: int) -> None:
        if meter is None or await self._shares.spend(meter, amount):
            return
        self._counts.of(self._tenant).rejected[meter.kind] += 1
        raise self._refusal(meter, amount)

    def _refusal(self, meter: Meter, amount: int) -> HttpError:
        what, whose = _NAMES[meter.kind], f"tenant {self._tenant!r}"
        kind = "tokens" if meter.kind == "tokens" else "requests"
        never = ((b"x-should-retry", b"false"),)
        if meter.limit == 0:
            message = f"{whose} may not ask this server: its limit of {what} is 0"
            return HttpError(429, message, kind="insufficient_quota", code="insufficient_quota", headers=never)
        if amount > meter.limit:
            message = (
                f"Request too large for {whose} on {what}: Limit {meter.limit}, Requested {amount}. Send a shorter "
                "prompt or a smaller max_tokens"
            )
            return HttpError(429, message, kind=kind, code="rate_limit_exceeded", headers=never)
        wait = meter.wait_s(amount, self._shares.second)
        used = meter.limit - meter.remaining
        message = (
            f"Rate limit reached for {whose} on {what}: Limit {meter.limit}, Used {used}, Requested {amount}. Please "
            f"try again in {wait}s."
        )
        retry = ((b"retry-after", b"%d" % wait), (b"retry-after-ms", b"%d" % (wait * 1000)))
        return HttpError(429, message, kind=kind, code="rate_limit_exceeded", headers=retry)


class _Hold:
    """What one request has reserved."""

    def __init__(
        self,
        tenant: str,
        shares: Shares,
        counts: TenantCounts,
        running: Meter | None,
        tokens: Meter | None,
        num_tokens: int,
    ) -> None:
        self._tenant = tenant
        self._shares = shares
        self._counts = counts
        self._running = running
        self._tokens = tokens
        self._num_tokens = num_tokens
        self._second = shares.second
        self._is_over = False

    def settle(self, prompt_tokens: int, generated_tokens: int) -> None:
        if self._is_over:
            return
        self._is_over = True
        now = self._shares.second
        if self._running is not None:
            self._running.correct(self._second, 1, 0, now)
        if self._tokens is not None:
            self._tokens.used.move(now)
            self._tokens.correct(self._second, self._num_tokens, prompt_tokens + generated_tokens, now)
        counts = self._counts.of(self._tenant)
        counts.prompt_tokens += prompt_tokens
        counts.generation_tokens += generated_tokens


def _duration(seconds: int) -> bytes:
    """As OpenAI writes it: 1s, 6m0s."""
    minutes, rest = divmod(seconds, 60)
    return b"%dm%ds" % (minutes, rest) if minutes else b"%ds" % rest
