"""The hook of a worker pod, run against a Ray cluster of three nodes: streams end, then the node does."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.helm import rendered
from tests.support.ports import free_port

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("demo")]
ENGINE = {
    "model": {"path": "smollm2-135m", "max_model_len": 512},
    "cache": {"cpu_memory_gib": 0.1},
    "runtime": {"device": "cpu", "num_threads": 1},
}
VALUES = {"service": {"models": [{"engine": ENGINE, "drain_timeout_s": 120}]}}


def worker_hook() -> str:
    """The part of the preStop hook that asks for the drain."""
    (service,) = (one for one in rendered.documents(VALUES) if one["kind"] == "RayService")
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    hook = group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    drain, wait = hook.splitlines()[1].split(" && ")
    assert wait.startswith("exec sleep ")
    return drain


def run_program(*arguments: str) -> str:
    """The program's output. Whatever of it lives at the end is killed."""
    # One host stands for three: one proxy, Serve's own, and Ray's ports on loopback.
    env = {**os.environ, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_SERVE_ENABLE_HA_PROXY": "0"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    command = [sys.executable, "-m", "tests.helm.two_nodes", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
        return output
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            for one in (*family, process):
                one.kill()
            process.communicate()


@pytest.mark.nightly
def test_a_drained_node_ends_its_streams_and_then_itself(tmp_path):
    config = rendered.serve_config(VALUES)
    config["http_options"] = {"host": "127.0.0.1", "port": free_port()}
    config["proxy_location"] = "HeadOnly"
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    outcome = json.loads(run_program(str(path), worker_hook()).splitlines()[-1])
    assert outcome["drain"] == 0, outcome["said"]
    assert outcome["reasons"] == ["length"]
    assert outcome["gone"] and outcome["after"] == 200
