"""Rolling updates and changes of the number of replicas while clients stream without a pause: no request is lost.

pytest tests/serving/test_updates_under_load.py -m nightly -o log_cli=true -o log_cli_level=INFO
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.support.paced_cluster import PacedCluster, paced_cluster
from tests.support.paced_config import paced_config
from tests.support.ports import free_port
from tests.support.streams_under_load import Client, Seen, open_session
from tests.support.weighted_proxy import WeightedProxy

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
logger = logging.getLogger(__name__)
STREAMS = 12
REPLICAS = 3
# Ten times fewer, from three to one at once too, and a single replica again and again.
NUMBERS = (1, 2, 1, 3, 2, 1, 3, 2, 1, 3, 2, 1, 3, 1, 2, 1)
# An update before each of these changes: of one, of two and of three replicas.
UPDATES_BEFORE = (1, 2, 3, 4, 5, 6, 9, 10, 14, 15)


def config(port: int, replicas: int, edition: int) -> dict[str, Any]:
    """Another `edition` changes a model's args, so that Serve replaces its replicas."""
    engine = {
        "model": {"path": "smollm2-135m", "name": "m", "max_model_len": 4096},
        "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_queued_requests": 1000 + edition},
    }
    # Half of the streams outlive a drain, and go on at another replica.
    model = {"engine": engine, "cost": "10:20:100:0", "start_s": 1.0, "drain_timeout_s": 2.0}
    # On a busy machine a single replica's successor takes longer than the 30 s that a request waits by default.
    face = {"routing": {"hold_s": 120, "failover_wait_s": 120}}
    return paced_config(port, ingresses=1, engines=replicas, model=model, face=face)


@asynccontextmanager
async def streaming(url: str) -> AsyncIterator[Seen]:
    """Clients that ask this address all the time; at the end each reads its last stream."""
    seen = Seen()
    async with open_session() as session:
        clients = [Client(session, url, seen, random.Random(number)) for number in range(STREAMS)]
        running = [asyncio.create_task(client.run(time.monotonic() + 3600)) for client in clients]
        try:
            yield seen
        finally:
            for client in clients:
                client.leave()
            await asyncio.gather(*running)


async def is_empty(url: str, replicas: int) -> bool:
    """Whether the server's engines, so many, have no request and no block in use."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/state") as answer:
        (model,) = (await answer.json())["models"]
    engines = model["engines"]
    return len(engines) == replicas and all(
        each["running"] == each["waiting"] == each["cache_usage"] == 0 for each in engines
    )


async def wait_until_empty(url: str, replicas: int) -> None:
    deadline = time.monotonic() + 60
    while not await is_empty(url, replicas):
        assert time.monotonic() < deadline, "requests or blocks are left"
        await asyncio.sleep(0.5)


async def change(cluster: PacedCluster, seen: Seen, port: int, replicas: int, edition: int) -> None:
    begun = time.monotonic()
    await asyncio.to_thread(cluster.apply, config(port, replicas, edition))
    line = "%d replicas of edition %d after %.1f s; %d whole streams, %d left by clients, longest gap %.1f s"
    took = time.monotonic() - begun
    logger.info(line, replicas, edition, took, seen.whole, seen.aborted, seen.longest_gap_s)
    assert not (seen.wrong or seen.refused), (seen.refused, seen.wrong[:3])


async def test_ten_updates_and_ten_scale_downs_lose_no_request(demo):
    port, edition, replicas = free_port(), 0, REPLICAS
    downs = sum(after < before for before, after in zip((REPLICAS, *NUMBERS), NUMBERS, strict=False))
    assert (len(UPDATES_BEFORE), downs) == (10, 10)
    with paced_cluster(config(port, replicas, edition)) as cluster:
        async with streaming(cluster.url) as seen:
            await asyncio.sleep(5)
            for place, number in enumerate(NUMBERS):
                if place in UPDATES_BEFORE:
                    edition += 1
                    await change(cluster, seen, port, replicas, edition)
                replicas = number
                await change(cluster, seen, port, replicas, edition)
        assert not (seen.wrong or seen.refused), (seen.refused, seen.wrong[:3])
        assert seen.whole > 10 * STREAMS, "they streamed all the time"
        await wait_until_empty(cluster.url, replicas)
        assert len(cluster.processes("PacedEngine")) == len(cluster.processes(":ModelReplica")) == replicas
        logger.info("%d whole streams, %d left, longest gap %.1f s", seen.whole, seen.aborted, seen.longest_gap_s)


async def test_an_incremental_upgrade_to_another_cluster_loses_no_request(demo):
    """As KubeRay does it: the new cluster grows while the old one shrinks, a gateway moves the traffic in steps, and
    the old cluster ends when its last streams have."""
    ports = [free_port(), free_port()]
    with paced_cluster(config(ports[0], 2, 0)) as old, paced_cluster(config(ports[1], 1, 1)) as new:
        proxy = WeightedProxy([old.url, new.url])
        async with proxy.listening() as url, streaming(url) as seen:
            await asyncio.sleep(5)
            for share in (20, 40, 60, 80, 100):
                proxy.weights = [100 - share, share]
                await asyncio.sleep(4)
                logger.info("%d percent to the new cluster: asked %s, live %s", share, proxy.asked, proxy.live)
                if share == 40:
                    await change(new, seen, ports[1], 2, 1)
                if share == 60:
                    await change(old, seen, ports[0], 1, 0)
            asked_old = proxy.asked[0]
            await _end(old, proxy)
            whole = seen.whole
            await asyncio.sleep(10)
            assert seen.whole > whole, "the new cluster serves alone"
            assert proxy.asked[0] == asked_old > 0, "nothing more is asked of the old one"
        assert not (seen.wrong or seen.refused), (seen.refused, seen.wrong[:3])
        await wait_until_empty(new.url, 2)
        logger.info("%d whole streams, %d left, longest gap %.1f s", seen.whole, seen.aborted, seen.longest_gap_s)


async def _end(old: PacedCluster, proxy: WeightedProxy) -> None:
    """Stop the old cluster once its last stream is over."""
    deadline = time.monotonic() + 120
    while proxy.live[0]:
        assert time.monotonic() < deadline, f"{proxy.live[0]} streams of the old cluster do not end"
        await asyncio.sleep(0.2)
    await wait_until_empty(old.url, 1)
    assert not await asyncio.to_thread(old.close)
