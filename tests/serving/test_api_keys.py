"""API keys: which requests need one, what a client without one gets, and how a file of keys changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import AsyncOpenAI, AuthenticationError

from raylm.api.errors import HttpError
from raylm.api.metrics import HttpMetrics
from raylm.config.application import load_ingress
from raylm.config.serving import HttpConfig
from raylm.errors import ConfigError
from raylm.serving.app import ingress_application
from raylm.serving.http import build_router
from raylm.serving.keys import LOOK_EVERY_S, ApiKeys, read_keys
from raylm.serving.serve_file import serve_config
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
        keys.check(f"Bearer {key}".encode())
    except HttpError as error:
        assert error.status == 401
        return False
    return True


CATALOG = Server().catalog
OPEN = ["/health", "/version", "/metrics"]
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


@pytest.mark.parametrize(("method", "url"), ASKED)
@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "Bearer wrong", "key-of-anna", "Basic key-of-anna", "Bearer key-of-Anna"]
)
async def test_a_request_without_a_key_gets_nothing(path: Path, method: str, url: str, value: str | None) -> None:
    server = guarded(path)
    headers = {} if value is None else {"authorization": value}
    answer = await server.http.request(method, url, headers=headers, content=b"{")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert error["message"] and "wrong" not in answer.text and "anna" not in answer.text.lower()
    assert server.generator.requests == []


@pytest.mark.parametrize("value", ["Bearer key-of-anna", "bearer key-of-ben", "BEARER   key#4 "])
async def test_any_of_the_keys_will_do(path: Path, value: str) -> None:
    http = guarded(path).http
    assert (await http.get("/v1/models", headers={"authorization": value})).status_code == 200
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
    assert (await http.post("/v1/completions", headers={"authorization": value}, json=body)).status_code == 200


@pytest.mark.parametrize("value", [b"Bearer \xff\xfe", b"Bearer key-of-anna key-of-ben", b"Bearer " + b"x" * 50_000])
async def test_odd_headers_are_wrong_keys(path: Path, value: bytes) -> None:
    assert (await guarded(path).http.get("/v1/models", headers={b"authorization": value})).status_code == 401


@pytest.mark.parametrize("url", OPEN)
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
        lambda: serve_config("smollm2-135m", host=None, port=None, api_keys_file=str(path)),
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
        face, *_ = serve_config(target, host=None, port=None, api_keys_file=api_keys_file)["applications"]
        return load_ingress(face.get("args", {}), source="test").http.api_keys_file

    assert (keys(str(path)), keys(None)) == (str(path), None)
