"""The ASGI side: bodies, disconnects, headers, health, metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import raylm
from raylm.core.step import TokenDelta
from raylm.errors import Overloaded
from tests.support.openai_fakes import RawClient, Server, ended

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def encode(**fields: Any) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


async def finished(task: asyncio.Task[None]) -> None:
    await asyncio.wait_for(task, timeout=60)
    assert task.cancelling() == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_disconnect_while_streaming(n: int) -> None:
    server = Server(b"one", None)
    client = RawClient(server.app, encode(stream=True, n=n))
    await client.arrived.wait()
    while len(client.sent) < 1 + n:
        await asyncio.sleep(0)
    assert server.generator.live == n
    client.gone.set()
    await finished(client.task)
    assert server.generator.live == 0
    assert len(server.generator.aborted) == n
    assert not any(message.get("more_body") is False for message in client.sent)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_disconnect_before_the_request_is_taken(stream: bool, n: int) -> None:
    server = Server(None)
    server.generator.admission = asyncio.Event()
    client = RawClient(server.app, encode(stream=stream, n=n))
    while server.generator.live < n:
        await asyncio.sleep(0)
    client.gone.set()
    await finished(client.task)
    assert len(server.generator.aborted) == n
    assert client.sent == []


async def test_disconnect_of_an_answer_that_is_not_streamed() -> None:
    server = Server(b"one", None)
    client = RawClient(server.app, encode())
    while server.generator.live < 1:
        await asyncio.sleep(0)
    client.gone.set()
    await finished(client.task)
    assert len(server.generator.aborted) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_stops_reading_holds_its_choices_back(n: int) -> None:
    server = Server(max_model_len=1000)
    client = RawClient(server.app, encode(stream=True, n=n, max_tokens=500))
    client.reads.clear()
    for _ in range(1000):
        await asyncio.sleep(0)
    assert server.generator.num_deltas <= 4 * n
    client.reads.set()
    await finished(client.task)
    assert server.generator.num_deltas == 500 * n
    assert sum(message["type"] == "http.response.body" for message in client.sent) == 1 + 500 * n + 2


async def test_the_server_may_cancel_a_request() -> None:
    server = Server(b"one", None)
    client = RawClient(server.app, encode(stream=True))
    await client.arrived.wait()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert len(server.generator.aborted) == 1


async def test_disconnect_in_the_middle_of_the_body() -> None:
    server = Server()
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "root_path": "", "headers": []}
    await server.app(scope, receive, send)
    assert sent == []


async def test_each_delta_is_sent_at_once_with_one_message() -> None:
    server = Server(b"one", b"two", b"three", ended())
    client = RawClient(server.app, encode(stream=True), chunks=5)
    await finished(client.task)
    assert [message["type"] for message in client.sent] == ["http.response.start"] + 7 * ["http.response.body"]
    assert client.sent[-1] == {"type": "http.response.body", "body": b""}
    assert [message.get("more_body", False) for message in client.sent[1:]] == 6 * [True] + [False]


async def test_body_over_the_limit_is_not_read_to_its_end() -> None:
    server = Server(max_body_bytes=1000)
    client = RawClient(server.app, b"x" * 100_000, chunks=100)
    await finished(client.task)
    assert client.sent[0]["status"] == 413
    assert client.received == 2
    error = json.loads(client.sent[1]["body"])["error"]
    assert error["code"] == "request_too_large" and "1000 bytes" in error["message"]


async def test_body_announced_over_the_limit_is_not_read_at_all() -> None:
    server = Server(max_body_bytes=100)
    response = await server.http.post("/v1/chat/completions", content=b"x" * 101)
    assert response.status_code == 413
    exact = encode(max_tokens=1).ljust(100)
    assert (await server.http.post("/v1/chat/completions", content=exact)).status_code == 200


async def test_stream_headers() -> None:
    response = await Server().chat(stream=True, max_tokens=1)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"


async def test_health_and_version() -> None:
    server = Server()
    assert (await server.http.get("/health")).status_code == 200
    server.catalog.is_ready = False
    assert (await server.http.get("/health")).status_code == 200, "it lives without engines"
    server.catalog.is_alive = False
    assert (await server.http.get("/health")).status_code == 503
    assert (await server.http.get("/version")).json() == {"version": raylm.__version__}


async def test_ready_says_which_models_can_be_asked() -> None:
    server = Server()
    response = await server.http.get("/ready")
    assert (response.status_code, response.json()) == (
        200,
        {"status": "ready", "models": {"tiny": "ready", "late": "ready"}},
    )
    server.catalog.is_ready = False
    response = await server.http.get("/ready")
    assert response.status_code == 503
    assert response.json() == {"status": "not ready: late", "models": {"tiny": "ready", "late": "no engine is up"}}
    response = await server.http.get("/ready?model=tiny")
    assert (response.status_code, response.json()) == (200, {"status": "ready", "models": {"tiny": "ready"}})
    assert (await server.http.get("/ready?model=late")).status_code == 503
    response = await server.http.get("/ready?model=other")
    assert response.status_code == 404 and "'other' does not exist" in response.json()["status"]


CARD = {
    "id": "tiny",
    "created": 1_700_000_000,
    "max_model_len": 64,
    "root": "tiny",
    "permission": [
        {
            "id": "modelperm-tiny",
            "created": 1_700_000_000,
            "object": "model_permission",
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": False,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
    ],
    "parent": None,
    "object": "model",
    "owned_by": "raylm",
}


async def test_models() -> None:
    server = Server()
    for path in ("/v1/models", "/v1/models/"):
        assert (await server.http.get(path)).json() == {"data": [CARD], "object": "list"}
    assert (await server.http.get("/v1/models/tiny")).json() == CARD


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/metrics", "/state", "/v1/models", "/v1/models/", "/v1/models/tiny"]
)
async def test_head_is_get_without_the_body(path: str) -> None:
    http = Server().http
    head, whole = await http.head(path), await http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    if path != "/metrics":  # It counts the looks at it too.
        assert dict(head.headers) == dict(whole.headers)


@pytest.mark.parametrize("path", ["/nothing", "/v1/models/nobody"])
async def test_head_of_nothing(path: str) -> None:
    response = await Server().http.head(path)
    assert (response.status_code, response.content) == (404, b"")
    assert int(response.headers["content-length"]) > 0


async def test_head_of_what_takes_post_only() -> None:
    assert (await Server().http.head("/v1/completions")).status_code == 405


async def test_below_a_route_prefix() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/llm/health", "root_path": "/llm", "headers": []}
    await Server().app(scope, receive, send)
    assert sent[0]["status"] == 200


async def test_lifespan_and_websockets() -> None:
    app = Server().app
    sent: list[Any] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    await app({"type": "websocket", "path": "/v1/chat/completions", "root_path": "", "headers": []}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


async def scrape(server: Server) -> dict[tuple[str, tuple[str, ...]], float]:
    response = await server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name.removeprefix("raylm:"), tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_metrics() -> None:
    server = Server(b"he", b"l", b"lo", ended())
    await server.chat()
    await server.complete(stream=True, n=2)
    found = await scrape(server)
    assert found["request_success_total", ("stop", "tiny")] == 3
    assert found["prompt_tokens_total", ("tiny",)] == 10 + 2
    assert found["generation_tokens_total", ("tiny",)] == 3 * 6
    longest = [found[f"request_max_num_generation_tokens_{end}", ("tiny",)] for end in ("count", "sum")]
    assert longest == [2, 2 * 6], "a prompt counts once, with its longest completion"
    assert found["time_to_first_token_seconds_count", ("tiny",)] == 3
    assert found["inter_token_latency_seconds_count", ("tiny",)] == 3 * 4
    assert found["e2e_request_latency_seconds_count", ("tiny",)] == 3
    assert found["e2e_request_latency_seconds_bucket", ("+Inf", "tiny")] == 3
    assert found["num_requests_running", ("engine-0", "tiny")] == 3
    assert found["num_requests_waiting", ("engine-0", "tiny")] == 2
    assert found["kv_cache_usage_perc", ("engine-0", "tiny")] == 0.25
    assert found["num_prompt_tokens_waiting", ("engine-0", "tiny")] == 60
    assert found["num_preemptions_total", ("engine-0", "tiny")] == 9
    assert found["num_swaps_total", ("engine-0", "tiny")] == 4
    assert found["prefix_cache_queries_total", ("engine-0", "tiny")] == 100
    assert found["prefix_cache_hits_total", ("engine-0", "tiny")] == 75
    assert found["spec_decode_num_drafts_total", ("engine-0", "tiny")] == 10
    assert found["spec_decode_num_draft_tokens_total", ("engine-0", "tiny")] == 30
    assert found["spec_decode_num_accepted_tokens_total", ("engine-0", "tiny")] == 17
    by_position = [found["spec_decode_num_accepted_tokens_per_pos_total", (p, "engine-0", "tiny")] for p in "012"]
    assert by_position == [9, 6, 2]


async def test_a_prompts_cached_tokens_count_once() -> None:
    first = TokenDelta("", [*b"on"], None, num_cached_tokens=3)
    server = Server(first, ended(b"e"))
    await server.complete(n=2)
    found = await scrape(server)
    assert found["prompt_tokens_cached_total", ("tiny",)] == 3


async def test_metrics_of_requests_that_do_not_end_well() -> None:
    server = Server(b"one", None)
    client = RawClient(server.app, encode(stream=True))
    await client.arrived.wait()
    client.gone.set()
    await finished(client.task)
    server.generator.script = [Overloaded("the queue is full", retry_after=1.0)]
    await server.chat()
    server.generator.script = [TokenDelta("", [], "deadline", "too late")]
    await server.chat(n=2)
    found = await scrape(server)
    assert found["prompt_tokens_total", ("tiny",)] == 10, "a refused prompt does not count"
    assert found["request_success_total", ("deadline", "tiny")] == 2
    assert found["request_success_total", ("abort", "tiny")] == 1
    assert found["request_success_total", ("error", "tiny")] == 1
    assert found["generation_tokens_total", ("tiny",)] == 3
    assert found["request_max_num_generation_tokens_sum", ("tiny",)] == 3, "of the one that had begun"


async def test_two_applications_count_apart() -> None:
    first, second = Server(), Server()
    await first.chat(max_tokens=1)
    assert ("generation_tokens_total", ("tiny",)) in await scrape(first)
    assert ("generation_tokens_total", ("tiny",)) not in await scrape(second)
