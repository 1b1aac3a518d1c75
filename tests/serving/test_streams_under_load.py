"""The clients and the proxy of tests/serving/test_updates_under_load.py: that a lost or wrong token does not get past
them."""

from __future__ import annotations

import json
import random
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.support.paced_config import position_token
from tests.support.streams_under_load import Client, Seen, open_session
from tests.support.weighted_proxy import WeightedProxy

HARMS = {
    "none": lambda tokens: tokens,
    "one missing": lambda tokens: tokens[:1] + tokens[2:],
    "one twice": lambda tokens: tokens[:1] + tokens,
    "one wrong": lambda tokens: [tokens[0] + 1, *tokens[1:]],
    "cut": lambda tokens: tokens[:-1],
}


@asynccontextmanager
async def served(harm: str, num_asked: list[int]):
    """A server whose streams have all their tokens, but for this harm to the first choice."""

    async def complete(request: web.Request) -> web.StreamResponse:
        num_asked[0] += 1
        body = await request.json()
        if harm in ("refused", "busy"):
            headers = {"retry-after": "1"} if harm == "busy" else {}
            return web.json_response({"error": {"message": "full"}}, status=503, headers=headers)
        length, tokens, n = len(body["prompt"]), body["max_tokens"], body["n"]
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index in range(n):
            whole = [position_token(length + place) for place in range(tokens)]
            ids = HARMS[harm](whole) if index == 0 and harm in HARMS else whole
            await send(response, {"choices": [{"index": index, "token_ids": ids}]})
        if harm == "an error":
            await send(response, {"error": {"message": "It was stopped", "code": "engine_stopped"}})
        usage = {"prompt_tokens": length, "completion_tokens": n * tokens - (harm == "usage")}
        await send(response, {"choices": [], "usage": usage})
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def send(response: web.StreamResponse, event: dict) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


async def ask(url: str, times: int) -> Seen:
    seen = Seen()
    async with open_session() as session:
        client = Client(session, url, seen, random.Random(1))
        for _ in range(times):
            await client.ask()
    return seen


@pytest.mark.parametrize("harm", [*HARMS, "refused", "an error", "usage"])
async def test_a_stream_that_is_not_what_it_must_be_is_wrong(harm):
    async with served(harm, [0]) as url:
        seen = await ask(url, 8)
    ended = seen.whole + len(seen.wrong)
    assert ended + seen.aborted == 8 and ended > 4
    assert (seen.whole, len(seen.wrong)) == ((ended, 0) if harm == "none" else (0, ended))


async def test_a_refusal_with_retry_after_is_no_lost_stream():
    async with served("busy", [0]) as url:
        seen = await ask(url, 1)
    assert seen == Seen(refused=1)


async def test_the_proxy_sends_each_server_its_share():
    num_asked = [[0], [0]]
    async with served("none", num_asked[0]) as first, served("none", num_asked[1]) as second:
        proxy = WeightedProxy([first, second])
        async with proxy.listening() as url:
            for weights, expected in (([100, 0], [10, 0]), ([80, 20], [18, 2]), ([0, 100], [18, 12])):
                proxy.weights = weights
                seen = await ask(url, 10)
                assert not seen.wrong and seen.whole > 5
                assert proxy.asked == [num_asked[0][0], num_asked[1][0]] == expected
            assert proxy.live == [0, 0]
