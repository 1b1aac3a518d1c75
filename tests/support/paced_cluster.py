"""A cluster that serves engines without a model (tests/support/paced.py), in a process and a temporary folder of its
own, so that one test can have several.

The process reads Serve config files' contents from its standard input, one JSON a line, applies each, and prints
"ready" when all that changes has been changed. It ends with its input.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support.hangup import ended_by_hangup
from tests.support.titled import titled

_CHANGE_S = 240.0


class PacedCluster:
    """The process, its clients' address, and what is left of it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.folder = Path(tempfile.mkdtemp(prefix="paced-"))
        self._log = (self.folder / "log").open("w")
        self._process = subprocess.Popen(
            ended_by_hangup([sys.executable, "-m", "tests.support.paced_cluster"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "TMPDIR": str(self.folder)},
            start_new_session=True,
        )
        self._answers: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def apply(self, config: dict[str, Any]) -> None:
        """What `serve deploy` does; returns when every replica is the one that it is to be."""
        before = len(self._answers)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(config) + "\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + _CHANGE_S
        while len(self._answers) == before:
            assert self._process.poll() is None and time.monotonic() < deadline, self.log()[-3000:]
            time.sleep(0.05)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def processes(self, title: str) -> list[psutil.Process]:
        """Those of the cluster with this in their title."""
        return titled(title, under=self._process.pid)

    def close(self) -> list[str]:
        """End it; returns what did not end by itself, in words. May be called twice."""
        if self._log.closed:
            return []
        family = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        assert self._process.stdin is not None
        self._process.stdin.close()
        left = []
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            left.append("the cluster's own process")
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        _, alive = psutil.wait_procs(family, timeout=20)
        for process in alive:
            left.append(f"process {process.pid}, {process.status()}")
            process.kill()
        left += [f"folder {path.name}" for path in self.folder.glob("raylm-steps-*")]
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return left

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if line == "ready\n":
                    self._answers.append(line)


@contextmanager
def paced_cluster(config: dict[str, Any]) -> Iterator[PacedCluster]:
    """A cluster that serves this configuration; nothing of it is left afterwards."""
    cluster = PacedCluster(config["http_options"]["port"])
    try:
        cluster.apply(config)
        yield cluster
    finally:
        left = cluster.close()
    assert not left, left


def redeploy(content: dict[str, Any]) -> None:
    """What `serve deploy` does where Serve runs; returns when every deployment has as many replicas as it is to have,
    and none that stops or starts. Raises TimeoutError where that takes too long."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(content), _blocking=False)
    deadline = time.monotonic() + _CHANGE_S
    time.sleep(1)  # Serve's controller sees in its next round what there is to do.
    while time.monotonic() < deadline:
        if _are_settled(serve.status().applications, content["applications"]):
            return
        time.sleep(0.2)
    raise TimeoutError(f"the change was not over in {_CHANGE_S:g} s: {serve.status()}")


def _are_settled(found: dict[str, Any], wanted: list[dict[str, Any]]) -> bool:
    for application in wanted:
        status = found[application["name"]]
        for deployment in application["deployments"]:
            # While an application is built anew, Serve knows no deployment of it.
            if (known := status.deployments.get(deployment["name"])) is None:
                return False
            replicas = known.replica_states
            if status.status != "RUNNING" or replicas != {"RUNNING": deployment["num_replicas"]}:
                return False
    return True


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray import serve

        from tests.support.deployed import deploy

        ray.init("local", num_cpus=4, include_dashboard=False, namespace="serve", _node_ip_address="127.0.0.1")
        for number, line in enumerate(sys.stdin):
            (redeploy if number else deploy)(json.loads(line))
            print("ready", flush=True)
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
