"""`raylm serve` with HAProxy: an ingress that hangs is replaced, and Ctrl-C tells clients why their streams end."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
import pytest

from tests.support import checkpoints
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]
LIMIT_S = 120.0
logger = logging.getLogger(__name__)


@contextmanager
def stream(url: str, model: str) -> Iterator[Iterator[str]]:
    """The lines of a long stream that has begun."""
    body = {"model": model, "prompt": "A", "max_tokens": 32000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        assert answer.status_code == 200, answer.read()
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert "error" not in next(lines)
        yield lines


def ingresses(server: psutil.Process) -> list[psutil.Process]:
    return processes(server, "OpenAIIngress")


def processes(server: psutil.Process, name: str) -> list[psutil.Process]:
    """The server's processes with this in the first word of their command."""
    found = []
    for process in server.children(recursive=True):
        try:
            title = " ".join(process.cmdline()[:1])
            if name in title and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def answers(url: str, model: str) -> bool:
    body = {"model": model, "prompt": "A", "max_tokens": 1}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.nightly
def test_an_ingress_that_hangs_is_replaced_and_ctrl_c_tells_streams(tmp_path):
    folder = checkpoints.llama(tmp_path, max_position_embeddings=32768)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(str(folder), "--port", str(port)) as (process, lines):
        wait_for_line(process, lines, f"ready: {url}/v1")
        (hung,) = ingresses(psutil.Process(process.pid))
        with stream(url, folder.name) as events, pytest.raises(httpx.TransportError):
            os.kill(hung.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            deadline = stopped + LIMIT_S
            while not answers(url, folder.name):
                assert time.monotonic() < deadline, "no other ingress answers"
            logger.info(
                "| the only ingress is stopped (SIGSTOP) | answers again after %.1f s |", time.monotonic() - stopped
            )
            # Killed, although it cannot hear that it should end: its clients are not left in silence.
            list(events)
        (successor,) = ingresses(psutil.Process(process.pid))
        assert successor.pid != hung.pid
        with stream(url, folder.name) as events:
            process.send_signal(signal.SIGINT)
            *_, told, done = events
        error = json.loads(told.removeprefix("data: "))["error"]
        assert done == "data: [DONE]"
        assert (error["code"], error["message"]) == ("server_stopped", "the server is shutting down")
        assert process.wait(60) == 0


@pytest.mark.nightly
def test_streams_and_requests_go_on_while_rays_head_is_away(tmp_path):
    """Ray's own processes give up after a minute without it."""
    folder = checkpoints.llama(tmp_path, max_position_embeddings=32768)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(str(folder), "--port", str(port)) as (process, lines):
        wait_for_line(process, lines, f"ready: {url}/v1")
        (head,) = processes(psutil.Process(process.pid), "gcs_server")
        with stream(url, folder.name) as events:
            head.kill()
            for _ in range(5):  # Longer than the ingress and the replica wait between two looks at the Directory.
                time.sleep(1)
                body = {"model": folder.name, "prompt": "A", "max_tokens": 1}
                assert httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S).status_code == 200
                assert "error" not in next(events)
