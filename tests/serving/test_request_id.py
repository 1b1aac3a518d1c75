"""x-request-id: which ids are taken, and where they stand."""

from __future__ import annotations

import logging

import pytest

from raylm.serving.request_id import request_id
from tests.support.openai_fakes import Server


@pytest.mark.parametrize("given", [b"mine", b"0b9e7c5e-8f4a-4f0e", b"!" * 128, b"a~b"])
def test_a_sane_id_is_kept(given: bytes) -> None:
    assert request_id({b"x-request-id": given}) == given.decode()


@pytest.mark.parametrize("given", [b"", b"two words", b"\xff", b"a\x00", b"tab\t", b"line\n", b"!" * 129])
def test_an_odd_id_is_replaced(given: bytes) -> None:
    first, second = (request_id({b"x-request-id": given}) for _ in range(2))
    assert first != second and first.startswith("req_") and len(first) == 36
    assert request_id({}).startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_line_of_an_error_has_it(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    server = Server(b"some", RuntimeError("unforeseen"))
    body = {"model": "tiny", "prompt": "hi", "stream": stream}
    with caplog.at_level(logging.ERROR, logger="raylm"):
        answer = await server.http.post("/v1/completions", json=body, headers={"x-request-id": "find-me"})
    assert answer.status_code == (200 if stream else 500)
    (line,) = caplog.messages
    assert "request find-me" in line
