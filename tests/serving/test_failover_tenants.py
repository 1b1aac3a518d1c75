"""Engines that die under tenants with limits: usage, limits and metrics count every token once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from raylm.errors import EngineDeadError
from tests.serving.test_failover import Host, router_of
from tests.serving.test_tenants import Served
from tests.support.openai_fakes import sse

PROMPT = [5, 6, 7]
LIMITS = "default: {tokens_per_minute: 100, concurrent_requests: 1}"


class Engines:
    """A server with a limited tenant whose requests run on engines that can die."""

    def __init__(self, folder: Path, **routing: object) -> None:
        self.hosts = [Host("a"), Host("b")]
        self.router = router_of(self.hosts, **routing)
        self.served = Served(folder, LIMITS)
        catalog = self.served.server.catalog
        catalog.model = replace(catalog.model, generator=self.router)

    async def ask(self, **fields: object) -> httpx.Response:
        return await self.served.ask(prompt=PROMPT, ignore_eos=True, **fields)

    @property
    def busy(self) -> Host:
        (found,) = (host for host in self.hosts if host.sequences)
        return found

    async def steps(self, number: int) -> None:
        while not any(host.sequences for host in self.hosts):
            await asyncio.sleep(0.01)
        for _ in range(number):
            self.busy.step()
            await asyncio.sleep(0)

    async def to_the_end(self, asking: asyncio.Task[httpx.Response]) -> httpx.Response:
        while not asking.done():
            for host in self.hosts:
                host.step()
            await asyncio.sleep(0)
        return asking.result()

    async def counted(self, name: str) -> float:
        """What the tenant is said to have used."""
        return (await self.served.metric(name))['tenant="team-a"']

    async def of_the_model(self, name: str) -> float:
        lines = (await self.served.server.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"raylm:{name}_total{{"))


@pytest.mark.parametrize("stream", [False, True])
async def test_each_token_counts_once_however_many_engines_die(tmp_path: Path, stream: bool) -> None:
    engines = Engines(tmp_path)
    asking = asyncio.create_task(
        engines.ask(
            max_tokens=20, n=2, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
        )
    )
    for number in (4, 7):
        await engines.steps(number)
        dead = engines.busy
        dead.die(EngineDeadError("it died"))
        refused = await engines.ask(max_tokens=1)
        assert refused.status_code == 429 and "concurrent requests" in refused.text, "it runs, wherever it is"
        engines.hosts.remove(dead)
        engines.hosts.append(Host(f"successor {number}"))
        engines.router.engines = {host.entry.engine_id: host for host in engines.hosts}
    answer = await engines.to_the_end(asking)
    assert answer.status_code == 200 and engines.router.num_resumed == 2
    usage = sse(answer)[-1]["usage"] if stream else answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 40)
    assert await engines.counted("prompt_tokens") == 3 == await engines.of_the_model("prompt_tokens")
    assert await engines.counted("generation_tokens") == 40 == await engines.of_the_model("generation_tokens")
    engines.served.clock.now += 1
    last = await engines.to_the_end(asyncio.create_task(engines.ask(max_tokens=2)))
    assert last.headers["x-ratelimit-remaining-tokens"] == str(100 - 43 - 5)


async def test_what_cannot_go_on_pays_for_what_it_had(tmp_path: Path) -> None:
    engines = Engines(tmp_path, failover_wait_s=0.1)
    asking = asyncio.create_task(engines.ask(max_tokens=20, stream=True))
    await engines.steps(6)
    dead = engines.busy
    engines.router.engines = {}
    dead.die(EngineDeadError("it died"))
    answer = await asyncio.wait_for(asking, 120)
    assert sse(answer)[-1]["error"]["code"] == "engine_dead"
    assert await engines.counted("prompt_tokens") == 3 and await engines.counted("generation_tokens") == 6
    engines.served.clock.now += 1
    # Its place is free again, and so are the tokens that it had reserved and not used.
    engines.hosts = [Host("c")]
    engines.router.engines = {"c": engines.hosts[0]}
    last = await engines.to_the_end(asyncio.create_task(engines.ask(max_tokens=2)))
    assert last.headers["x-ratelimit-remaining-tokens"] == str(100 - 9 - 5)


async def test_what_had_no_token_pays_nothing(tmp_path: Path) -> None:
    engines = Engines(tmp_path, failover_wait_s=0.1)
    asking = asyncio.create_task(engines.ask(max_tokens=20))
    await engines.steps(0)
    dead = engines.busy
    engines.router.engines = {}
    dead.die(EngineDeadError("it died"))
    answer = await asyncio.wait_for(asking, 120)
    assert answer.status_code == 503 and answer.headers["x-ratelimit-remaining-tokens"] == "100"
