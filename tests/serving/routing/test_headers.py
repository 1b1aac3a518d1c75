"""What requests say in headers of where they want to go, and answers of where they came from."""

from __future__ import annotations

import pytest

from tests.support.openai_fakes import Server, ended

ASKS = {"x-raylm-route": "1"}
BODY = {"model": "tiny", "prompt": "a", "max_tokens": 1}


def told(answer) -> tuple[str | None, str | None]:
    return answer.headers.get("x-raylm-engine"), answer.headers.get("x-raylm-route")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("when", "told_unasked", "told_asked"), [("never", 0, 0), ("asked", 0, 1), ("always", 1, 1)])
async def test_an_answer_says_where_it_comes_from(stream, when, told_unasked, told_asked) -> None:
    server = Server(b"x", ended(), route_headers=when)
    decision = ("scripted", "prefix; matched-tokens=16")
    nothing = (None, None)
    for headers, is_told in (({}, told_unasked), (ASKS, told_asked)):
        answer = await server.http.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
        assert answer.status_code == 200 and told(answer) == (decision if is_told else nothing)


async def test_what_no_engine_answered_has_no_such_header() -> None:
    server = Server(route_headers="always")
    answer = await server.http.post("/v1/completions", json={"model": "another", "prompt": "a"}, headers=ASKS)
    assert answer.status_code == 404 and told(answer) == (None, None)


async def test_a_header_names_the_session() -> None:
    server = Server(session_header="x-conversation")
    for headers in ({"x-conversation": "mine"}, {"x-session-id": "mine"}):
        await server.http.post("/v1/completions", json=BODY, headers=headers)
    assert [asked.options.session for asked in server.generator.requests] == ["mine", ""]
    long = await server.http.post("/v1/completions", json=BODY, headers={"x-conversation": "s" * 257})
    assert long.status_code == 400 and "session" in long.json()["error"]["message"]
