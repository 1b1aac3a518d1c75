"""What limits of tenants cost a request: where its ingress holds enough, and where the Directory is asked.

python -m tests.serving.limit_cost
"""

from __future__ import annotations

import asyncio
import json
import time

import ray

from raylm.config.tenants import TenantConfig
from raylm.serving.identity.counts import TenantCounts
from raylm.serving.identity.quota import TenantQuota
from raylm.serving.identity.shares import Shares
from raylm.serving.ingress import directory_exchange

REQUESTS = 20_000
TENANTS = 300
LIMITS = TenantConfig(requests_per_minute=10**9, tokens_per_minute=10**12, concurrent_requests=10**6)


async def of_a_busy_tenant() -> float:
    """Microseconds."""
    shares = Shares()
    quota = TenantQuota("t", LIMITS, shares, TenantCounts())

    async def ask(times: int) -> None:
        for _ in range(times):
            await quota.begin()
            hold = await quota.reserve(100)
            quota.headers()
            hold.settle(50, 20)

    await ask(REQUESTS // 10)
    await shares.settle()
    start = time.perf_counter()
    await ask(REQUESTS)
    return (time.perf_counter() - start) / REQUESTS * 1e6


async def of_a_tenants_first() -> list[float]:
    """Milliseconds, in order."""
    shares = Shares(directory_exchange("limit-cost"))
    await shares.settle()  # The Directory is made.
    await shares.settle()
    took = []
    for number in range(TENANTS):
        meter = shares.meter(f"t{number}", "requests", 10)
        start = time.perf_counter()
        assert await shares.spend(meter, 1)
        took.append((time.perf_counter() - start) * 1e3)
    return sorted(took)


def main() -> None:
    busy = asyncio.run(of_a_busy_tenant())
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    first = asyncio.run(of_a_tenants_first())
    ray.shutdown()
    p50, p99 = first[TENANTS // 2], first[TENANTS * 99 // 100]
    print(json.dumps({"busy_us": round(busy, 1), "first_p50_ms": round(p50, 2), "first_p99_ms": round(p99, 2)}))


if __name__ == "__main__":
    main()
