"""What browsers may do: nothing unless origins are configured, and then everything that a client does."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylm.errors import Overloaded
from tests.support.openai_fakes import RawClient, Server, ended

PAGE = "https://chat.example.org"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 1}


@pytest.mark.parametrize("origins", [[], ["https://other.example.org"]])
async def test_a_page_that_is_not_listed_is_told_so(origins: list[str]) -> None:
    http = Server(cors_origins=origins).http
    answer = await http.options("/v1/completions", headers={"origin": PAGE, **PREFLIGHT})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "origin_not_allowed"
    assert PAGE in error["message"] and "http.cors_origins" in error["message"]
    assert not any(name.startswith("access-control") for name in answer.headers)
    plain = await http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
    assert plain.status_code == 200, "other clients send the header too"
    assert "access-control-allow-origin" not in plain.headers


@pytest.mark.parametrize(("origins", "allowed"), [([PAGE, "http://localhost:3000"], PAGE), (["*"], "*")])
async def test_a_page_that_is_listed_may_ask(tmp_path: Path, origins: list[str], allowed: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    http = Server(cors_origins=origins, api_keys_file=str(keys)).http
    for path in ("/v1/chat/completions", "/v1/models", "/health"):
        preflight = await http.options(path, headers={"origin": PAGE, **PREFLIGHT})
        assert preflight.status_code == 200, "a browser sends no key with it"
        assert preflight.headers["access-control-allow-origin"] == allowed
        assert preflight.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in preflight.headers
    for key, status in (("secret", 200), ("wrong", 401)):
        headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
        answer = await http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == allowed
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after"} <= set(exposed)
        assert "access-control-allow-credentials" not in answer.headers


async def test_streams_and_errors_have_the_headers_too() -> None:
    server = Server(b"x", ended(), cors_origins=[PAGE])
    for fields in ({"stream": True}, {"temperature": -1}):
        answer = await server.http.post("/v1/completions", json=BODY | fields, headers={"origin": PAGE})
        assert answer.status_code == (200 if "stream" in fields else 400)
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "Origin"
    assert (await server.http.get("/nothing", headers={"origin": PAGE})).headers["access-control-allow-origin"] == PAGE
    server.generator.script = [Overloaded("full", retry_after=3)]
    answer = await server.http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.headers["access-control-allow-origin"] == PAGE


async def test_a_method_that_no_route_has() -> None:
    http = Server(cors_origins=[PAGE]).http
    headers = {"origin": PAGE, "access-control-request-method": "DELETE"}
    answer = await http.options("/v1/models/tiny", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_a_stream_is_sent_as_without_cors() -> None:
    sent = []
    for origins in ([], ["*"]):
        server = Server(b"a", b"b", ended(), cors_origins=origins)
        client = RawClient(server.app, b'{"model": "tiny", "prompt": "hi", "stream": true}', path="/v1/completions")
        await client.task
        sent.append([(message["type"], message.get("more_body")) for message in client.sent])
    assert sent[0] == sent[1]
