"""`timings`: how long a request took."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.openai_fakes import Server, ended, sse


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_an_answer_says_how_long_it_took(kind: str) -> None:
    server = Server(b"one", ended(b"two"))
    body = (await getattr(server, kind)(timings=True)).json()
    check(body["timings"], body["usage"], num_tokens=7)
    assert "timings" not in (await getattr(server, kind)()).json()


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_a_streams_last_event_says_it(kind: str) -> None:
    server = Server(b"one", ended(b"two"))
    *events, last = sse(await getattr(server, kind)(timings=True, stream=True))
    assert last["choices"] == []
    check(last["timings"], last["usage"], num_tokens=7)
    assert not any("timings" in event for event in events)
    assert not any("timings" in event for event in sse(await getattr(server, kind)(stream=True)))


async def test_without_tokens() -> None:
    timings = (await Server().complete(timings=True, max_tokens=0)).json()["timings"]
    assert timings["first_token_s"] is None and timings["tokens_per_s"] is None and timings["total_s"] > 0


def check(timings: dict[str, Any], usage: dict[str, Any], *, num_tokens: int) -> None:
    assert 0 < timings["first_token_s"] <= timings["total_s"]
    assert timings["tokens_per_s"] > 0
    assert timings["completion_tokens"] == usage["completion_tokens"] == num_tokens
    assert timings["prompt_tokens"] == usage["prompt_tokens"]
    assert timings["cached_tokens"] == 0
