"""`raylm serve` as a user runs it: HAProxy in front, an answer, and nothing left after a hangup."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
import yaml
from openai import AuthenticationError, OpenAI

from raylm.serving.causes import cause
from tests.helm import rendered
from tests.support import checkpoints
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

pytestmark = pytest.mark.serve


@pytest.mark.usefixtures("demo")
def test_serve_answers_and_leaves_nothing_behind(tmp_path):
    """With the application that the Helm chart submits by default."""
    application = tmp_path / "serve.yaml"
    application.write_text(yaml.safe_dump(rendered.serve_config({})), encoding="utf-8")
    port = free_port()
    keys = tmp_path / "keys"
    keys.write_text("mine\n")
    options = ("--host", "127.0.0.1", "--port", str(port), "--api-keys-file", str(keys))
    with running(str(application), *options) as (process, lines):
        wait_for_line(process, lines, f"ready: http://127.0.0.1:{port}/v1")
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="mine", max_retries=5) as client:
            model = client.models.list().data[0].id
            message = {"role": "user", "content": "What is the capital of France?"}
            answer = client.chat.completions.create(model=model, messages=[message], temperature=0, max_tokens=16)
            assert "Paris" in answer.choices[0].message.content
            with pytest.raises(AuthenticationError):
                client.with_options(api_key="theirs").chat.completions.create(model=model, messages=[message])
            keys.write_text("theirs  # from now on\n")
            wait_until_listed(client.with_options(api_key="theirs"), model)
            with pytest.raises(AuthenticationError):
                client.models.list()
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (401, ["mine"])
        for probe in ("/health", "/ready", "/-/healthz"):
            assert httpx.get(f"http://127.0.0.1:{port}{probe}").status_code == 200
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("haproxy" in child.name() for child in family)
        scripts = {os.path.basename(word) for child in family for word in child.cmdline()[:4] if word.endswith(".py")}
        assert "log_monitor.py" in scripts
        # Ray's option leaves it out in part only, and waits for the rest; and there is nothing to scale.
        assert not scripts & {"dashboard.py", "monitor.py"}
        assert {niceness(child) for child in family} - {None} == {os.getpriority(os.PRIO_PROCESS, 0)}
        assert not [child.cmdline()[0] for child in family if maps(child, "/pandas/")]
        assert not [c for c in process_addresses(family, port) if not c.startswith("127.")]
        # As a terminal that is closed does it; Ray's processes must not be hit before Serve has ended.
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(180) == 0
        assert not any("graceful_shutdown" in line for line in lines)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive, [child.cmdline()[:2] for child in alive]


def wait_until_listed(client: OpenAI, model: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            assert client.models.list().data[0].id == model
            return
        except AuthenticationError:
            assert time.monotonic() < deadline, "the new key does not count"
            time.sleep(0.1)


def niceness(process: psutil.Process) -> int | None:
    try:
        return process.nice()
    except psutil.Error:
        return None


def maps(process: psutil.Process, part: str) -> bool:
    """Whether the process has loaded a library at such a path."""
    try:
        return any(part in region.path for region in process.memory_maps())
    except psutil.Error:
        return False  # It has ended, as HAProxy's programs do.


def process_addresses(family: list[psutil.Process], port: int) -> list[str]:
    """Addresses on which the family listens at `port`."""
    connections = [c for child in family if child.is_running() for c in child.net_connections("tcp")]
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def test_a_wrong_configuration_ends_in_a_sentence_before_anything_starts(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("model: {path: smollm2-135m}\nscheduler: {max_num_seq: 3}\n")
    command = [sys.executable, "-m", "raylm.cli", "serve", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "key 'scheduler.max_num_seq' is unknown (did you mean 'max_num_seqs'?)" in result.stderr
    assert str(path) in result.stderr and "Traceback" not in result.stderr
    assert "Ray" not in result.stderr


@pytest.mark.nightly
def test_a_model_that_fails_in_its_replica_ends_in_its_sentence(tmp_path, monkeypatch):
    weights = checkpoints.llama(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    monkeypatch.setenv("RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT", "1")
    with running(str(tmp_path), "--port", str(free_port())) as (process, lines):
        assert process.wait(120) == 2
    problem = re.escape(str(weights)) + r": the file ends inside tensor \S+: it is cut short"
    assert re.fullmatch(f"raylm: application 'model-{tmp_path.name}' did not start: {problem}\n", lines[-1])


@pytest.mark.nightly
def test_a_front_that_does_not_start_ends_in_a_sentence(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S", "0")
    with running("smollm2-135m", "--port", str(free_port())) as (process, lines):
        assert process.wait(120) == 2
    assert "Traceback" not in "".join(lines)
    problem = r"HAProxy \(pid=\d+\) did not take over the admin socket within 0 seconds; on a slow machine .*"
    assert re.fullmatch(rf"raylm: the HTTP front .* did not start: {problem}\n", lines[-1])


def test_the_cause_of_a_failure_is_what_a_traceback_ends_with():
    traceback = "Error:\nTraceback (most recent call last):\n  File 'x'\n"
    messages = ["Failed to update the deployments ['a']."]
    assert cause([*messages, traceback + "ValueError: no"]) == f"{messages[0]} ValueError: no"
    assert cause([*messages, traceback + "raylm.errors.ConfigError: x is 3\n" + traceback]) == "x is 3"
