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
    headers = {"origin": PAGE, "access-control-request-method": "PUT"}
    answer = await http.options("/v1/models/tiny", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


FORMS = [
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
]
RAW = b'{"model": "tiny", "prompt": "hi", "max_tokens": 1}'


@pytest.mark.parametrize("content_type", [*FORMS, None])
@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
async def test_a_foreign_page_may_not_post_without_asking(content_type: str | None, origin: str) -> None:
    """What browsers send without a preflight: the page would not see the answer, but the model would work for it."""
    server = Server(cors_origins=[PAGE])
    headers = {"origin": origin} | ({} if content_type is None else {"content-type": content_type})
    answer = await server.http.post("/v1/completions", content=RAW, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert server.generator.requests == []
    for other in (PAGE, "http://raylm"):
        answer = await server.http.post("/v1/completions", content=RAW, headers=headers | {"origin": other})
        assert answer.status_code == 200, "a listed page, and one of the server itself"
    without = {name: value for name, value in headers.items() if name != "origin"}
    assert (await server.http.post("/v1/completions", content=RAW, headers=without)).status_code == 200, "no browser"


async def test_pages_may_delete() -> None:
    headers = {"origin": PAGE, "access-control-request-method": "DELETE"}
    answer = await Server(cors_origins=[PAGE]).http.options("/v1/responses/r", headers=headers)
    assert answer.status_code == 200
    assert "DELETE" in answer.headers["access-control-allow-methods"].split(", ")


async def test_options_without_an_origin_says_what_a_path_takes() -> None:
    for path, methods in (("/v1/models", "GET, HEAD, OPTIONS"), ("/v1/completions", "POST, OPTIONS")):
        answer = await Server().http.options(path)
        assert (answer.status_code, answer.headers["allow"], answer.content) == (200, methods, b"")
    assert (await Server().http.options("/nothing")).status_code == 404


async def test_a_stream_is_sent_as_without_cors() -> None:
    sent = []
    for origins in ([], ["*"]):
        server = Server(b"a", b"b", ended(), cors_origins=origins)
        client = RawClient(server.app, b'{"model": "tiny", "prompt": "hi", "stream": true}', path="/v1/completions")
        await client.task
        sent.append([(message["type"], message.get("more_body")) for message in client.sent])
    assert sent[0] == sent[1]
