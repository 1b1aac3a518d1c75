"""Tenants over HTTP: limits and what is said of them, terms, deadlines in headers, counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, RateLimitError

from raylm.api.quota import OPEN_TOKENS
from raylm.config.base import load_yaml
from raylm.config.serving import HttpConfig
from raylm.config.tenants import TenantsConfig
from raylm.errors import ConfigError, Overloaded
from raylm.serving.identity.counts import OTHERS, TenantCounts
from raylm.serving.identity.ledger import Claim, Ledger, Reply
from raylm.serving.identity.shares import Exchange, Shares
from raylm.serving.identity.watch import LOOK_EVERY_S
from tests.support.openai_fakes import Item, Server, ended
from tests.support.openai_fakes import sse as events

KEYS = """
{"key": "a1", "tenant": "team-a"}
{"key": "a2", "tenant": "team-a"}
{"key": "b", "tenant": "team-b"}
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Served:
    """A server with keys, and limits of tenants in a file."""

    def __init__(
        self, folder: Path, limits: str, *script: Item, exchange: Exchange | None = None, **config: object
    ) -> None:
        (folder / "keys").write_text(KEYS)
        self.limits = folder / "tenants.yaml"
        self.limits.write_text(limits)
        self.clock = Clock()
        files = {"api_keys_file": str(folder / "keys"), "tenants_file": str(self.limits)}
        self.server = Server(*script, shares=Shares(exchange, clock=self.clock), **files, **config)

    async def ask(self, key: str = "a1", headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, **fields}
        headers = {"authorization": f"Bearer {key}", **(headers or {})}
        return await self.server.http.post("/v1/completions", json=body, headers=headers)

    @property
    def options(self):
        return self.server.generator.requests[-1].options

    async def metric(self, name: str) -> dict[str, float]:
        lines = (await self.server.http.get("/metrics")).text.splitlines()
        found = [line.rpartition(" ") for line in lines if line.startswith(f"raylm:tenant_{name}_total")]
        return {series.partition("{")[2].rstrip("}"): float(value) for series, _, value in found}


async def test_requests_a_minute(tmp_path: Path) -> None:
    served = Served(tmp_path, "tenants: {team-a: {requests_per_minute: 2}}")
    first = await served.ask("a1")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "1m1s"
    assert "x-ratelimit-limit-tokens" not in first.headers
    served.clock.now += 20
    assert (await served.ask("a2")).status_code == 200, "keys of one tenant share its limits"
    refused = await served.ask("a1")
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (429, "requests", "rate_limit_exceeded")
    assert "tenant 'team-a'" in error["message"] and "Limit 2, Used 2, Requested 1" in error["message"]
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("41", "41000")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await served.ask("b")).status_code == 200
    assert (await served.ask("a1", headers={"x-api-key": "nobody", "authorization": ""})).status_code == 401
    served.clock.now += 41
    assert (await served.ask("a1")).status_code == 200
    assert await served.metric("requests") == {'tenant="team-a"': 4, 'tenant="team-b"': 1, f'tenant="{OTHERS}"': 0}
    assert await served.metric("requests_rejected") == {'limit="requests",tenant="team-a"': 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_reserved_then_settled(tmp_path: Path, stream: bool) -> None:
    """A prompt of 2 tokens; 30 may be generated, 3 are."""
    served = Served(tmp_path, "default: {tokens_per_minute: 40}", ended(b"ab"))
    answers = [await served.ask(max_tokens=30, stream=stream) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    # The headers go out before the tokens have come where it is a stream.
    left = ["8", "3"] if stream else ["35", "30"]
    assert [answer.headers["x-ratelimit-remaining-tokens"] for answer in answers] == [*left, "30"]
    error = answers[2].json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
    assert "Limit 40, Used 10, Requested 32" in error["message"]
    assert (await served.ask(max_tokens=28)).status_code == 200
    assert await served.metric("prompt_tokens") == {'tenant="team-a"': 6, f'tenant="{OTHERS}"': 0}
    assert await served.metric("generation_tokens") == {'tenant="team-a"': 9, f'tenant="{OTHERS}"': 0}


async def test_a_request_that_no_minute_has_room_for(tmp_path: Path) -> None:
    served = Served(tmp_path, "tenants: {team-a: {tokens_per_minute: 20}, team-b: {tokens_per_minute: 0}}")
    for key, code, words in (
        ("a1", "rate_limit_exceeded", "too large"),
        ("b", "insufficient_quota", "limit of tokens"),
    ):
        refused = await served.ask(key, max_tokens=30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, code)
        assert words in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false" and "retry-after" not in refused.headers


async def test_an_open_length_reserves_a_part_and_is_charged_at_the_end(tmp_path: Path) -> None:
    served = Served(tmp_path, "default: {tokens_per_minute: 3000}", ended(b"x" * 1500), ended(), max_model_len=100_000)

    async def chat() -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return await served.server.http.post(
            "/v1/chat/completions", json={"messages": messages, "model": "tiny"}, headers={"x-api-key": "b"}
        )

    assert OPEN_TOKENS < 1500
    assert int((await chat()).headers["x-ratelimit-remaining-tokens"]) < 1500
    assert (await chat()).status_code == 200
    assert (await chat()).status_code == 429


async def test_concurrent_requests(tmp_path: Path) -> None:
    served = Served(tmp_path, "default: {concurrent_requests: 1}", asyncio.Event(), ended(b"a"))
    gate = served.server.generator.script[0]
    first = asyncio.create_task(served.ask())
    while not served.server.generator.live:
        await asyncio.sleep(0.01)
    refused = await served.ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "concurrent requests" in refused.json()["error"]["message"]
    gate.set()
    assert (await first).status_code == 200
    served.clock.now += 1
    assert (await served.ask()).status_code == 200


async def test_what_is_refused_below_costs_no_tokens(tmp_path: Path) -> None:
    served = Served(
        tmp_path, "default: {tokens_per_minute: 40, concurrent_requests: 1}", Overloaded("full", retry_after=1)
    )
    for _ in range(3):
        answer = await served.ask(max_tokens=30)
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (503, "40")
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 9}
    answer = await served.server.http.post("/v1/responses", json=body, headers={"x-api-key": "a1"})
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (503, "40")


async def test_a_client_that_leaves_pays_for_what_it_had(tmp_path: Path) -> None:
    served = Served(tmp_path, "default: {tokens_per_minute: 40, concurrent_requests: 1}", None)
    asking = asyncio.create_task(served.ask(max_tokens=30, stream=True))
    while not served.server.generator.live:
        await asyncio.sleep(0.01)
    for _ in range(50):  # It has been taken and waits for its first token.
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    served.clock.now += 1
    served.server.generator.script = [ended()]
    answer = await served.ask(max_tokens=30)
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "35")


async def test_limits_change_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylm.serving.identity.watch.LOOK_EVERY_S", 0.0)
    served = Served(tmp_path, "default: {requests_per_minute: 1}")
    assert [(await served.ask()).status_code for _ in range(2)] == [200, 429]
    served.limits.write_text("default: {requests_per_minute: 3}\n")  # Another size: its time may be the same.
    served.clock.now += 1
    assert [(await served.ask()).status_code for _ in range(3)] == [200, 200, 429], "what was used still counts"
    served.limits.write_text("default: {requests_per_minute: many}")
    assert (await served.ask()).status_code == 429
    assert LOOK_EVERY_S > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"])
async def test_every_way_of_asking_counts(tmp_path: Path, path: str) -> None:
    served = Served(tmp_path, "default: {requests_per_minute: 1, tokens_per_minute: 500}", ended())
    messages = [{"role": "user", "content": "hi"}]
    body: dict[str, object] = {"model": "tiny", "max_tokens": 9, "messages": messages, "stream": False}
    if path.endswith("responses"):
        body = {"model": "tiny", "max_output_tokens": 9, "input": "hi"}
    for status in (200, 429):
        answer = await served.server.http.post(path, json=body, headers={"authorization": "Bearer a1"})
        assert answer.status_code == status, answer.text
        assert "error" in answer.text or status == 200
    assert served.server.generator.requests[0].options.tenant == "team-a"
    used = 500 - int(answer.headers["x-ratelimit-remaining-tokens"])
    assert used == len(served.server.generator.requests[0].prompt_ids) + 1
    listed = await served.server.http.get("/v1/models", headers={"authorization": "Bearer a1"})
    assert (listed.status_code, listed.headers["x-ratelimit-remaining-requests"]) == (200, "0")


async def test_two_ingresses_hold_one_limit(tmp_path: Path) -> None:
    ledger = Ledger()

    def of(name: str) -> Exchange:
        async def exchange(claims: Sequence[Claim], all_of_them: bool) -> Reply:
            return ledger.exchange(name, claims, all_of_them=all_of_them)

        return exchange

    ingresses = [Served(tmp_path, "default: {requests_per_minute: 9}", exchange=of(name)) for name in "xy"]
    answers = [await ingresses[number % 2].ask() for number in range(14)]
    assert [answer.status_code for answer in answers] == [200] * 9 + [429] * 5
    assert answers[-1].headers["x-ratelimit-remaining-requests"] == "0"


async def test_openais_client_understands(tmp_path: Path) -> None:
    served = Served(tmp_path, "default: {requests_per_minute: 0}")
    client = AsyncOpenAI(base_url="http://raylm/v1", api_key="a1", http_client=served.server.http, max_retries=5)
    with pytest.raises(RateLimitError) as refused:
        await client.completions.create(model="tiny", prompt="hi")
    assert refused.value.code == "insufficient_quota"
    assert await served.metric("requests_rejected") == {'limit="requests",tenant="team-a"': 1}, "it tries once"


TERMS = """
tenants:
  team-a: {weight: 3, best_priority: 5, longest_deadline_s: 10}
  team-b: {cache_sharing: all}
"""


async def test_terms_reach_the_engine(tmp_path: Path) -> None:
    served = Served(tmp_path, TERMS)
    await served.ask()
    assert (served.options.tenant, served.options.weight, served.options.priority) == ("team-a", 3, 5)
    assert served.options.deadline_s == 10
    await served.ask(priority=7, deadline_s=3, user="somebody")
    assert (served.options.priority, served.options.deadline_s, served.options.tenant) == (7, 3, "team-a")
    await served.ask(deadline_s=30)
    assert served.options.deadline_s == 10
    refused = await served.ask(priority=4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert "at least 5" in refused.json()["error"]["message"]
    await served.ask("b", priority=-9)
    assert (served.options.priority, served.options.weight, served.options.deadline_s) == (-9, None, None)


async def test_tenants_do_not_share_prefixes_unless_they_say_so(tmp_path: Path) -> None:
    served = Served(tmp_path, "tenants: {team-b: {cache_sharing: all}}")

    async def salt(key: str, **fields: object) -> str:
        assert (await served.ask(key, **fields)).status_code == 200
        return str(served.options.cache_salt)

    own = await salt("a1")
    assert own and own == await salt("a2") and await salt("b") == ""
    salts = {own, await salt("a1", cache_salt="x"), await salt("b", cache_salt="x"), await salt("b", cache_salt=own)}
    assert len(salts) == 4 and own not in await salt("b", cache_salt=own)
    open_server = Server()
    await open_server.complete(cache_salt="x")
    assert open_server.generator.requests[0].options.cache_salt == "x"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"x-request-deadline-ms": "1500"}, 1.5),
        ({"grpc-timeout": "2S"}, 2),
        ({"grpc-timeout": "250m", "x-request-deadline-ms": "500"}, 0.25),
        ({"x-request-deadline-ms": "9999999999"}, 7 * 24 * 3600),
        ({"x-request-deadline-ms": "0"}, "over 0"),
        ({"x-request-deadline-ms": "-5"}, "milliseconds"),
        ({"x-request-deadline-ms": ""}, "milliseconds"),
        ({"grpc-timeout": "5"}, "such as 30S"),
    ],
)
async def test_deadlines_in_headers(headers: dict[str, str], seconds: float | str) -> None:
    server = Server()
    for path, more in (
        ("completions", {"prompt": "hi"}),
        ("messages", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        body = {"model": "tiny", "max_tokens": 2, **more}
        answer = await server.http.post(f"/v1/{path}", json=body, headers=headers)
        if isinstance(seconds, str):
            assert answer.status_code == 400 and seconds in answer.text
        else:
            assert server.generator.requests[-1].options.deadline_s == seconds


async def test_the_soonest_deadline_counts(tmp_path: Path) -> None:
    served = Served(tmp_path, "default: {longest_deadline_s: 5}")
    for header, field, expected in (("9000", 8, 5), ("3000", 8, 3), ("3000", 2, 2)):
        await served.ask(headers={"x-request-deadline-ms": header}, deadline_s=field)
        assert served.options.deadline_s == expected


async def test_streams_say_the_limits_too(tmp_path: Path) -> None:
    served = Served(tmp_path, "default: {requests_per_minute: 5, tokens_per_minute: 100}")
    answer = await served.ask(stream=True)
    assert len(events(answer)) > 1
    assert answer.headers["x-ratelimit-remaining-requests"] == "4"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "94"


def test_series_have_a_cap() -> None:
    counts = TenantCounts(max_series=3)
    for number in range(10):
        counts.of(f"t{number}").requests += 1
    counts.of("t7").requests += 1
    counts.of("t10").requests += 1
    (requests, *_) = counts.collect()
    values = {sample.labels["tenant"]: sample.value for sample in requests.samples}
    assert values == {"t9": 1, "t7": 2, "t10": 1, OTHERS: 8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default: {rpm: 5}", ["default.rpm", "unknown"]),
        ("tenants: {a b: {}}", ["a b"]),
        ("tenants: {a: {requests_per_minute: -1}}", ["tenants.a.requests_per_minute", "-1"]),
        ("tenants: {a: {weight: 0}}", ["tenants.a.weight"]),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as told:
        load_yaml(TenantsConfig, path)
    assert all(word in str(told.value) for word in [str(path), *words])


def test_tenants_want_keys() -> None:
    with pytest.raises(ValueError, match="tenants_file wants api_keys_file"):
        HttpConfig(tenants_file="/tenants.yaml")
    with pytest.raises(ValueError, match="user_is_tenant is for servers without"):
        HttpConfig(api_keys_file="/keys", user_is_tenant=True)
