"""`raylm serve` that does not start says why. One that starts: test_front_of_servers.py."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from raylm.serving.causes import cause
from tests.support import checkpoints
from tests.support.ports import free_port
from tests.support.serve_process import running

pytestmark = pytest.mark.serve


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
