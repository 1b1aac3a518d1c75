"""What a simulation says of its requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles

from raylm.config.engine import SchedulerConfig
from raylm.sim.simulator import Outcome, Served


@dataclass(frozen=True, slots=True)
class SimResult:
    """One policy at one rate: all requests, or those of one tenant. Times in milliseconds, None where nothing came.

    `refused` counts requests that were not taken, `expired` those that ended at their deadline. Times are of all tokens
    that came; output_tokens_per_s is over the whole simulation.
    """

    bench: str
    trace: str
    policy: str
    target_itl_ms: float | None
    rate: float
    tenant: str
    requests: int
    refused: int
    expired: int
    seconds: float
    output_tokens_per_s: float
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    preemptions: int | None = None
    """Of all tenants together, as is the following; None on a tenant's own line."""
    prefix_hit_rate: float | None = None
    """Share of prompt tokens that were in the prefix cache."""

    @property
    def variant(self) -> str:
        """What a picture calls this curve."""
        return self.policy if self.target_itl_ms is None else f"{self.policy}, ITL ≤ {self.target_itl_ms:g} ms"


def summarize(outcome: Outcome, *, trace: str, config: SchedulerConfig, rate: float) -> list[SimResult]:
    """One result for all requests, then one for each tenant where there are several."""
    tenants = list(dict.fromkeys(served.arrival.tenant for served in outcome.served))
    groups = [("all", outcome.served)]
    if len(tenants) > 1:
        groups += [(name, [one for one in outcome.served if one.arrival.tenant == name]) for name in sorted(tenants)]
    results = []
    for name, served in groups:
        whole = served is outcome.served
        ttft = [one.ttft for one in served if one.ttft is not None]
        itl = [gap for one in served for gap in one.gaps]
        results.append(
            SimResult(
                bench="simulate",
                trace=trace,
                policy=config.policy,
                target_itl_ms=config.target_itl_ms,
                rate=rate,
                tenant=name,
                requests=len(served),
                refused=_count(served, "refused"),
                expired=_count(served, "deadline"),
                seconds=outcome.seconds,
                output_tokens_per_s=sum(len(one.times) for one in served) / outcome.seconds,
                ttft_ms_p50=_percentile(ttft, 50),
                ttft_ms_p90=_percentile(ttft, 90),
                ttft_ms_p99=_percentile(ttft, 99),
                itl_ms_p50=_percentile(itl, 50),
                itl_ms_p99=_percentile(itl, 99),
                preemptions=outcome.num_preemptions if whole else None,
                prefix_hit_rate=outcome.prefix_hit_rate if whole else None,
            )
        )
    return results


def _count(served: Iterable[Served], reason: str) -> int:
    return sum(one.end == reason for one in served)


def _percentile(seconds: Sequence[float], percent: int) -> float | None:
    """In milliseconds, interpolated linearly; None of nothing."""
    if not seconds:
        return None
    if len(seconds) == 1:
        return seconds[0] * 1e3
    return quantiles(seconds, n=100, method="inclusive")[percent - 1] * 1e3
