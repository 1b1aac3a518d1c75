"""A server under a path of a proxy, and the names by which it may be asked."""

from __future__ import annotations

import pytest

from raylm.config.serving import HttpConfig
from tests.support.openai_fakes import Server


@pytest.mark.parametrize("prefix", ["", "/llm/a"])
async def test_requests_come_with_the_path_and_without(prefix: str) -> None:
    server = Server(root_path="/llm/a")
    answer = await server.http.post(f"{prefix}/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 2})
    assert answer.status_code == 200
    for path in ("/health", "/docs", "/", "/page/style.css", "/v1/models/tiny"):
        assert (await server.http.get(f"{prefix}{path}")).status_code == 200, path
    document = (await server.http.get(f"{prefix}/openapi.json")).json()
    assert document["servers"] == [{"url": "/llm/a"}] and "/v1/completions" in document["paths"]
    missing = await server.http.get(f"{prefix}/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await server.http.get(f"{prefix}/v1/completions")
    assert wrong.status_code == 405


async def test_other_paths_are_no_part_of_it() -> None:
    server = Server(root_path="/llm")
    for path in ("/llmx/v1/models", "/llm/llm/v1/models", "/other/v1/models"):
        assert (await server.http.get(path)).status_code == 404
    assert "servers" not in (await Server().http.get("/openapi.json")).json()
    assert (await Server().http.get("/llm/v1/models")).status_code == 404


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "/a//b"])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ValueError, match="root_path"):
        HttpConfig(root_path=path)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("llm.example.org", 200),
        ("LLM.example.org:8443", 200),
        ("a.inner.example.org", 200),
        ("inner.example.org", 403),
        ("a.b.inner.example.org", 403),
        ("evil.example.com", 403),
        ("llm.example.org.evil.com", 403),
        ("[::1]:8000", 200),
        ("", 403),
    ],
)
async def test_names_by_which_models_may_be_asked(host: str, status: int) -> None:
    server = Server(allowed_hosts=["llm.example.org", "*.inner.example.org", "[::1]"])
    answer = await server.http.get("/v1/models", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "http.allowed_hosts" in answer.json()["error"]["message"]
    assert (await server.http.get("/health", headers={"host": host})).status_code == 200, "probes ask by address"


@pytest.mark.parametrize("host", ["Example.org", "a.b:80", "*", "*.", "a/b", ""])
def test_what_is_no_name(host: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        HttpConfig(allowed_hosts=[host])
