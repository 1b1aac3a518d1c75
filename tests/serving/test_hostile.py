"""Thousands of hostile requests against a live server, while a stream beside them goes on.

    pytest tests/serving/test_hostile.py -m nightly -o log_cli=true -o log_cli_level=INFO --hostile-requests 500

The seed is in the log, and --hostile-seed takes it again. Times are in the log too, and nothing is asserted of them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from pathlib import Path
from random import Random

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.hostile import MODEL, Hostile, hostile
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("demo"), pytest.mark.serve, pytest.mark.timeout(7200)]
log = logging.getLogger(__name__)
AT_ONCE = 16
STREAM_TOKENS = 200


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    given: int | None = pytestconfig.getoption("--hostile-seed")
    return secrets.randbits(32) if given is None else given


async def test_hostile_requests_stop_nobody(pytestconfig: pytest.Config, seed: int, tmp_path: Path) -> None:
    count = pytestconfig.getoption("--hostile-requests")
    log.info("%d requests, seed %d", count, seed)
    port = free_port()
    config = yaml.safe_load(Path("deployments/llm.yaml").read_text())
    engine = {"model": {"path": MODEL, "max_model_len": 2048}, "scheduler": {"max_queued_requests": 100_000}}
    next(app for app in config["applications"] if "engine" in app["args"])["args"]["engine"] = engine
    file = tmp_path / "llm.yaml"
    file.write_text(yaml.safe_dump(config))
    with running(str(file), "--port", str(port)) as (process, lines):
        wait_for_line(process, lines, f"ready: http://127.0.0.1:{port}/v1", seconds=300)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
            await under_fire(http, Random(seed), count)


async def under_fire(http: httpx.AsyncClient, random: Random, count: int) -> None:
    before, beside = await metrics(http), Beside(http)
    stream = asyncio.create_task(beside.run())
    statuses: Counter[tuple[str, int]] = Counter()
    left = iter([hostile] * count)

    async def attacker() -> None:
        for make in left:
            request = make(random)
            status = await ask(http, request)
            statuses[request.kind, status] += 1
            assert status < 500, (request.kind, status, request.body[:500])

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(attacker())
    beside.enough = True
    await stream
    after = await idle(http)
    for kind in sorted({kind for kind, _ in statuses}):
        log.info("%-13s %s", kind, {status: n for (one, status), n in sorted(statuses.items()) if one == kind})
    log.info("streams beside: %d, %d tokens, longest wait %.2f s", beside.streams, beside.tokens, beside.longest_s)
    log_lag(before, after)
    assert beside.streams > 0
    assert all(after[name] == 0 for name in ("running", "waiting", "kv"))


async def ask(http: httpx.AsyncClient, request: Hostile) -> int:
    headers = {"content-type": "application/json"}
    async with http.stream("POST", request.path, content=request.body, headers=headers) as answer:
        if answer.status_code >= 400:
            error = await answer.aread()
            assert b'"error"' in error, error[:500]
            return answer.status_code
        events = 0
        async for _ in answer.aiter_lines():
            events += 1
            if request.leaves_after is not None and events > request.leaves_after:
                break
        return answer.status_code


class Beside:
    """A client of good will: stream after stream, each with all of its tokens."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.enough = False
        self.streams = self.tokens = 0
        self.longest_s = 0.0

    async def run(self) -> None:
        body = {"model": MODEL, "prompt": "Once", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        while not self.enough:
            last, events = time.perf_counter(), []
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        now = time.perf_counter()
                        self.longest_s, last = max(self.longest_s, now - last), now
                        events.append(line)
            assert events[-1] == "data: [DONE]" and not any('"error"' in event for event in events)
            assert f'"completion_tokens":{STREAM_TOKENS}' in events[-2]
            self.streams += 1
            self.tokens += STREAM_TOKENS


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Gauges by short names, and the lag's buckets by their bounds."""
    short = {"num_requests_running": "running", "num_requests_waiting": "waiting", "kv_cache_usage_perc": "kv"}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            name = sample.name.removeprefix("raylm:")
            if name in short:
                found[short[name]] = sample.value
            elif name.startswith("event_loop_lag_seconds"):
                found[sample.labels.get("le", name)] = sample.value
    return found


async def idle(http: httpx.AsyncClient) -> dict[str, float]:
    """The metrics once nothing runs; those who left may take a step or two to be gone."""
    for _ in range(300):
        found = await metrics(http)
        if not any(found[name] for name in ("running", "waiting", "kv")):
            return found
        await asyncio.sleep(0.1)
    return found


def log_lag(before: dict[str, float], after: dict[str, float]) -> None:
    bounds = [name for name in after if name[0].isdigit()] + ["+Inf"]
    total = after["+Inf"] - before["+Inf"]
    assert total > 0, "the loop's lag is not observed"
    within = {bound: f"{(after[bound] - before[bound]) / total:.4%}" for bound in bounds}
    log.info("the loop's lag, %d observations: share within so many seconds: %s", total, within)
