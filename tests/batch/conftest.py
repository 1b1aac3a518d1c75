"""A small cluster as `ray start` makes it, in processes of its own, with what `ray job submit` needs."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.batch.ray_cluster import Cluster, kill, wait_for
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
ATTEMPTS = 5
"""Ray gives up a node that is not up after 30 s, as on a machine that is busy with much else."""


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("ray") / "start.log"
    for _ in range(ATTEMPTS):
        process, cluster = start(log)
        try:
            if has_started(process, log):
                yield cluster
                return
        finally:
            # All at once: a polite end takes half a minute.
            left = session_of(process.pid)
            process.kill()
            kill(left)
            process.wait(60)
            psutil.wait_procs(left, timeout=60)
    raise AssertionError(log.read_text())


def start(log: Path) -> tuple[subprocess.Popen[bytes], Cluster]:
    """`ray start` in a session of its own, which all of its processes stay in."""
    port, dashboard = free_port(), free_port()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env = os.environ | token | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONPATH": str(ROOT)}
    env.pop("RAY_ADDRESS", None)
    options = {
        "node-ip-address": "127.0.0.1",
        "port": port,
        "num-cpus": 2,
        "include-dashboard": "true",
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard,
        "ray-client-server-port": free_port(),
        # Jobs go through the agent, and without a port of its own it has none beside another cluster's.
        "dashboard-agent-listen-port": free_port(),
        "object-store-memory": 100 * 2**20,
    }
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{dashboard}"
    return process, Cluster(f"127.0.0.1:{port}", url, env, psutil.Process(process.pid))


def has_started(process: subprocess.Popen[bytes], log: Path) -> bool:
    wait_for(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, "ray start", log)
    return process.poll() is None


def session_of(leader: int) -> list[psutil.Process]:
    """The processes of a session, also those whose parent has ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.append(process)
    return found


@pytest.fixture
def no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """`raylm batch` in the process of the tests itself, which must not fork."""
    monkeypatch.setattr("raylm.serving.program.keeper.fork_keeper", lambda: None)
