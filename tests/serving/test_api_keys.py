"""API keys: which requests need one, what a client without one gets, and how a file of keys changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError, PermissionDeniedError
from starlette.routing import Route, Router

from raylm.api.call import Call
from raylm.api.errors import HttpError
from raylm.api.identity import SCOPES, Identity
from raylm.api.metrics import HttpMetrics
from raylm.config.application import load_ingress
from raylm.config.serving import HttpConfig
from raylm.errors import ConfigError
from raylm.serving.app import ingress_application
from raylm.serving.endpoint import Endpoint, HttpRoute
from raylm.serving.http import build_router
from raylm.serving.identity.callers import Callers
from raylm.serving.identity.keys import ApiKeys, read_keys
from raylm.serving.identity.watch import LOOK_EVERY_S
from raylm.serving.program.serve_file import HttpGiven, serve_config
from tests.support.openai_fakes import Server

KEYS = "# who has which\n\nkey-of-anna\n  key-of-ben\t# until May\r\n#key-of-carl\nkey#4\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(KEYS)
    return file


def guarded(path: Path) -> Server:
    return Server(api_keys_file=str(path))


def replace(path: Path, text: str) -> None:
    """As programs do that take care: the path has the old content or the new one, and never half of it."""
    other = path.with_name("new")
    other.write_text(text)
    other.replace(path)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admits(keys: ApiKeys, key: str) -> bool:
    try:
        keys.identify({b"authorization": f"Bearer {key}".encode()})
    except HttpError as error:
        assert error.status == 401
        return False
    return True


CATALOG = Server().catalog
OPEN = [
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/load",
    "/state",
    "/ping",
    "/openapi.json",
    "/",
    "/docs",
    "/page/{name}",
]
ASKED = [
    *((method, route.path.replace("{model:path}", "tiny"))
      for route in build_router(CATALOG, HttpConfig(), HttpMetrics(CATALOG)).routes if route.path not in OPEN
      for method in route.app.methods if method != "HEAD"),
    # A method that the route does not have, a model that is not there, and paths that are none.
    ("GET", "/v1/completions"),
    ("GET", "/v1/models/nobody"),
    ("POST", "/v1/nothing"),
    ("GET", "/v1/models/"),
    ("GET", "/v1"),
]  # fmt: skip


NO_KEYS = ["", "Bearer", "Bearer ", "Bearer wrong", "key-of-anna", "Basic key-of-anna", "Bearer key-of-Anna"]


@pytest.mark.parametrize(("method", "url"), ASKED)
async def test_a_request_without_a_key_gets_nothing(path: Path, method: str, url: str) -> None:
    server = guarded(path)
    for headers in ({}, *({"authorization": value} for value in NO_KEYS)):
        answer = await server.http.request(method, url, headers=headers, content=b"{")
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        # Anthropic's and Ollama's routes write errors their own way.
        if not url.startswith(("/v1/messages", "/api/")):
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        assert "API key" in answer.text and "wrong" not in answer.text and "anna" not in answer.text.lower()
        assert server.generator.requests == [], headers


@pytest.mark.parametrize("value", ["Bearer key-of-anna", "bearer key-of-ben", "BEARER   key#4 "])
async def test_any_of_the_keys_will_do(path: Path, value: str) -> None:
    http = guarded(path).http
    assert (await http.get("/v1/models", headers={"authorization": value})).status_code == 200
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
    assert (await http.post("/v1/completions", headers={"authorization": value}, json=body)).status_code == 200


async def test_anthropics_header_will_do(path: Path) -> None:
    http = guarded(path).http
    assert (await http.get("/v1/models", headers={"x-api-key": "key-of-ben"})).status_code == 200
    assert (await http.get("/v1/models", headers={"x-api-key": "wrong"})).status_code == 401


@pytest.mark.parametrize("value", [b"Bearer \xff\xfe", b"Bearer key-of-anna key-of-ben", b"Bearer " + b"x" * 50_000])
async def test_odd_headers_are_wrong_keys(path: Path, value: bytes) -> None:
    assert (await guarded(path).http.get("/v1/models", headers={b"authorization": value})).status_code == 401


@pytest.mark.parametrize("url", [path.replace("{name}", "page.js") for path in OPEN])
async def test_probes_need_no_key(path: Path, url: str) -> None:
    assert (await guarded(path).http.get(url)).status_code == 200
    assert (await guarded(path).http.get(url, headers={"authorization": "Bearer wrong"})).status_code == 200


async def test_what_is_nothing_is_told_to_whoever_has_a_key(path: Path) -> None:
    http = guarded(path).http
    assert (await http.get("/v1/nothing", headers={"authorization": "Bearer key-of-ben"})).status_code == 404
    assert (await http.get("/v10")).status_code == 404


async def test_without_a_file_nobody_is_asked() -> None:
    assert (await Server().http.get("/v1/models")).status_code == 200
    assert (await Server().http.get("/v1/models", headers={"authorization": "Bearer none"})).status_code == 200
    assert (await Server().http.get("/v1/nothing")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_knows_what_is_wrong(path: Path, stream: bool) -> None:
    server = guarded(path)
    message = {"role": "user", "content": "hi"}
    async with AsyncOpenAI(base_url="http://raylm/v1", api_key="wrong", http_client=server.http) as client:
        with pytest.raises(AuthenticationError) as caught:
            await client.chat.completions.create(model="tiny", messages=[message], stream=stream)
        assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
        assert server.generator.requests == []
        right = client.with_options(api_key="key-of-ben")
        await right.chat.completions.create(model="tiny", messages=[message], max_tokens=1)
    assert len(server.generator.requests) == 1


async def test_a_body_without_a_key_is_not_read(path: Path) -> None:
    async def body():
        raise AssertionError("read")
        yield b""

    assert (await guarded(path).http.post("/v1/completions", content=body())).status_code == 401


def test_keys_change_within_a_second(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    keys = ApiKeys(str(path), clock=clock)
    replace(path, "new-key\nkey-of-ben\n")
    assert admits(keys, "key-of-anna") and not admits(keys, "new-key")
    clock.now += LOOK_EVERY_S
    with caplog.at_level(logging.INFO, logger="raylm"):
        assert admits(keys, "new-key") and admits(keys, "key-of-ben") and not admits(keys, "key-of-anna")
        clock.now += LOOK_EVERY_S
        assert admits(keys, "new-key")
    assert caplog.messages == [f"the API keys have changed: 2 in {path}"]
    path.write_text("written-in-place\n")
    clock.now += LOOK_EVERY_S
    assert admits(keys, "written-in-place") and not admits(keys, "new-key")


def test_a_secret_is_a_link_that_moves(tmp_path: Path) -> None:
    """What kubelet does: the file is a link into ..data, which is a link to the folder of the moment."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "api-keys").write_text(f"{name}\n")
    data = tmp_path / "..data"
    data.symlink_to("first")
    path = tmp_path / "api-keys"
    path.symlink_to("..data/api-keys")
    clock = Clock()
    keys = ApiKeys(str(path), clock=clock)
    assert admits(keys, "first")
    (tmp_path / "..tmp").symlink_to("second")
    (tmp_path / "..tmp").replace(data)
    clock.now += LOOK_EVERY_S
    assert admits(keys, "second") and not admits(keys, "first")


@pytest.mark.parametrize(
    "spoil",
    [Path.unlink, lambda path: replace(path, "# none\n"), lambda path: replace(path, "two words\n")],
    ids=["gone", "empty", "wrong"],
)
def test_the_last_good_keys_stay(path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]) -> None:
    clock = Clock()
    keys = ApiKeys(str(path), clock=clock)
    spoil(path)
    with caplog.at_level(logging.INFO, logger="raylm"):
        for _ in range(3):
            clock.now += LOOK_EVERY_S
            assert admits(keys, "key-of-anna") and not admits(keys, "words") and not admits(keys, "two")
    (line,) = caplog.messages
    assert str(path) in line and "still those of before" in line and "two" not in line and "anna" not in line
    caplog.clear()
    replace(path, "good-again\n")
    clock.now += LOOK_EVERY_S
    assert admits(keys, "good-again") and not admits(keys, "key-of-anna")
    path.unlink()
    clock.now += LOOK_EVERY_S
    with caplog.at_level(logging.INFO, logger="raylm"):
        assert admits(keys, "good-again")
    assert len(caplog.messages) == 1, "it was good in between, so this is news"


def test_requests_do_not_read_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    keys = ApiKeys(str(path), clock=clock)
    looks = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda *args, **options: looks.append(args) or stat(*args, **options))
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("read"))
    for _ in range(10):
        assert admits(keys, "key-of-anna")
    assert looks == []
    clock.now += LOOK_EVERY_S
    for _ in range(10):
        assert admits(keys, "key-of-anna")
    assert looks == [(str(path),)]


def test_what_a_file_of_keys_holds(path: Path) -> None:
    assert read_keys(str(path)) == ["key-of-anna", "key-of-ben", "key#4"]


ENTRIES = """
# Each line stands alone.
plain-key
{"key": "all", "scopes": ["inference", "batch", "admin"], "tenant": "operations"}
{"key": "nightly", "scopes": ["batch"], "tenant": "team-a"}
  {"key": "second", "tenant": "team-a"}
{"key": "third"}
"""


def test_entries_say_tenant_and_scopes(path: Path) -> None:
    path.write_text(ENTRIES)
    keys = ApiKeys(str(path))

    def who(key: str) -> Identity:
        return keys.identify({b"authorization": f"Bearer {key}".encode()})

    assert who("all") == Identity("operations", SCOPES)
    assert who("nightly") == Identity("team-a", frozenset({"batch"}))
    assert who("second") == Identity("team-a", frozenset({"inference"}))
    own = {who(key).tenant for key in ("plain-key", "third")}
    assert len(own) == 2 and all(tenant.startswith("key-") and len(tenant) == 20 for tenant in own)
    assert who("third").scopes == who("plain-key").scopes == {"inference"}
    assert read_keys(str(path)) == ["plain-key", "all", "nightly", "second", "third"]


def test_of_keys_only_hashes_are_kept(path: Path) -> None:
    path.write_text(ENTRIES)
    kept = repr(vars(ApiKeys(str(path))))
    assert "team-a" in kept
    assert not any(repr(key) in kept or f"b{key!r}" in kept for key in read_keys(str(path)))


async def test_a_key_without_the_routes_scope(path: Path) -> None:
    path.write_text(ENTRIES)
    server = guarded(path)
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
    for key, status in (("nightly", 403), ("third", 200), ("all", 200)):
        answer = await server.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
        if status == 403:
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "missing_scope")
            assert "'inference'" in error["message"] and "batch" in error["message"]
    assert len(server.generator.requests) == 2
    async with AsyncOpenAI(base_url="http://raylm/v1", api_key="nightly", http_client=server.http) as client:
        with pytest.raises(PermissionDeniedError):
            await client.models.list()


async def test_a_call_carries_who_asks(path: Path) -> None:
    path.write_text(ENTRIES)
    calls: list[Call] = []

    async def run(call: Call) -> bytes:
        calls.append(call)
        return b"{}"

    for config in (HttpConfig(api_keys_file=str(path)), HttpConfig()):
        endpoint = Endpoint([HttpRoute("GET", "/things/{name}", "batch", run)], config, Callers(config))
        transport = httpx.ASGITransport(Router([Route("/things/{name}", endpoint)]))
        async with httpx.AsyncClient(transport=transport, base_url="http://raylm") as http:
            headers = {"authorization": "Bearer nightly", "x-request-id": "mine"}
            assert (await http.get("/things/a?b=c&d=", headers=headers)).status_code == 200
    with_keys, without = calls
    assert with_keys.identity[:2] == ("team-a", frozenset({"batch"}))
    assert without.identity == Identity("", SCOPES)
    assert (with_keys.path, with_keys.query, with_keys.request_id) == ({"name": "a"}, {"b": "c", "d": ""}, "mine")
    assert with_keys.headers[b"authorization"] == b"Bearer nightly"


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["cannot be read", "No such file"]),
        (b"", ["holds no keys", "one at least"]),
        (b"\n  \n# only this\n", ["holds no keys"]),
        (b"good\ntwo words\n", ["line 2", "without spaces"]),
        ("schlüssel".encode(), ["line 1", "printable ASCII"]),
        (b"\xef\xbb\xbfkey", ["line 1", "printable ASCII"]),
        (b"key\x00", ["line 1"]),
        (b'good\n{"key": "two words"}\n', ["line 2", "without spaces"]),
        (b'{"key": "good", "scopes": ["root"]}\n', ["line 1", "admin, batch, inference"]),
        (b'{"key": "good", "scopes": []}\n', ["line 1", "at least one scope"]),
        (b'{"key": "good", "tenant": "a b"}\n', ["line 1", "tenant of up to 100"]),
        (b'{"key": "a\\n"}\n', ["line 1"]),
        (b'{"good": {}}\n', ["line 1"]),
        (b'{"key": "good"\n', ["line 1"]),
        (b'good\n{"key": "good", "tenant": "t"}\n', ["line 2", "an earlier line"]),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(
    tmp_path: Path, content: bytes | None, parts: list[str]
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    config = load_ingress({"http": {"api_keys_file": str(path)}}, source="test")
    for start in (
        lambda: ingress_application(config),
        lambda: guarded(path),
        lambda: serve_config("smollm2-135m", host=None, port=None, given=HttpGiven(str(path))),
    ):
        with pytest.raises(ConfigError) as caught:
            start()
        said = str(caught.value)
        assert said.startswith(f"http.api_keys_file is {str(path)!r}")
        assert all(part in said for part in parts) and "good" not in said and "words" not in said


def test_a_folder_is_no_file_of_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_keys(str(tmp_path))


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("target", ["smollm2-135m", "deployments/llm.yaml", "deployments/multi-model.yaml"])
def test_the_option_of_raylm_serve_is_the_configurations_key(path: Path, target: str) -> None:
    def keys(api_keys_file: str | None) -> str | None:
        face, *_ = serve_config(target, host=None, port=None, given=HttpGiven(api_keys_file))["applications"]
        return load_ingress(face.get("args", {}), source="test").http.api_keys_file

    assert (keys(str(path)), keys(None)) == (str(path), None)
