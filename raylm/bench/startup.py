"""Start-up: from starting a process to its first answer, offline or as a server."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import IO, TYPE_CHECKING

from raylm.bench.report import StartupResult
from raylm.errors import RaylmError

if TYPE_CHECKING:
    import httpx

    from raylm.config.engine import EngineConfig

_POLL_S = 0.1
_STOP_TIMEOUT_S = 60.0
_TAIL_BYTES = 2000
_PARTS = re.compile(rb"(engine )?started in [\d.]+ s: (.+)$", re.MULTILINE)
"""How the server, and the engine in it, tell what their starts took."""


def measure_offline(config: EngineConfig, *, timeout_s: float) -> StartupResult:
    """Start a fresh process that loads the model and generates one token. Raises RaylmError with what it printed."""
    command = [sys.executable, "-m", "raylm.bench.fresh", config.model_dump_json()]
    with tempfile.TemporaryFile() as log:
        start = perf_counter()
        # Unbuffered, so that the first line read takes nothing of the second.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, bufsize=0)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            interpreter = perf_counter() - start
            output, _ = process.communicate(timeout=timeout_s)
            ready = perf_counter() - start
        except subprocess.TimeoutExpired:
            raise RaylmError(f"the model was not ready within {timeout_s:g} s{_tail(log)}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode != 0:
            raise RaylmError(f"the process ended with exit code {process.returncode}{_tail(log)}")
    phases: dict[str, float] = json.loads(output.splitlines()[-1])
    return StartupResult("startup", config.model.served_name, ready, {"interpreter": interpreter} | phases)


def measure_server(
    target: str, *, timeout_s: float, api_key: str | None = None, command: Sequence[str] | None = None
) -> StartupResult:
    """Start `raylm serve TARGET`, ask until it answers a chat request, stop it with SIGTERM and see it end.

    Phases: `listening` until the models are listed, `first_answer` from there, `stop` after the signal (not part of
    ready_s), then what the server tells of `listening`, and its engine of what that waits for. `command` replaces the
    server's command line; "{port}" in it becomes the port. Raises RaylmError.
    """
    port = _free_port()
    serve = [sys.executable, "-m", "raylm.cli", "serve", target, "--host", "127.0.0.1", "--port", "{port}"]
    words = [word.replace("{port}", str(port)) for word in command or serve]
    with tempfile.TemporaryFile() as log:
        start = perf_counter()
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            model, phases = _await_answer(process, f"http://127.0.0.1:{port}/v1", start, timeout_s, api_key)
            ready = perf_counter() - start
            phases["stop"] = _stop(process)
            phases |= _told_parts(log)
        except RaylmError as error:
            raise RaylmError(f"{error}{_tail(log)}") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return StartupResult("startup", model, ready, phases)


@contextmanager
def running_server(target: str, *, timeout_s: float) -> Iterator[tuple[str, str]]:
    """A fresh `raylm serve TARGET` while the block runs, once its model can be asked: the address of its API and the
    model's name. Raises RaylmError with the server's last words where it does not start."""
    port = _free_port()
    words = [sys.executable, "-m", "raylm.cli", "serve", target, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            try:
                model = _await_ready(process, f"http://127.0.0.1:{port}", perf_counter() + timeout_s)
            except RaylmError as error:
                raise RaylmError(f"{error}{_tail(log)}") from None
            yield f"http://127.0.0.1:{port}/v1", model
            _stop(process)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _await_ready(process: subprocess.Popen[bytes], root: str, deadline: float) -> str:
    import httpx

    with httpx.Client(base_url=root, timeout=10, trust_env=False) as client:
        while True:
            _pause(process, deadline, "have its model ready")
            try:
                if client.get("/ready").status_code == 200:
                    return str(client.get("/v1/models").json()["data"][0]["id"])
            except httpx.TransportError:
                continue


def _await_answer(
    process: subprocess.Popen[bytes], url: str, start: float, timeout_s: float, api_key: str | None
) -> tuple[str, dict[str, float]]:
    import httpx

    deadline = start + timeout_s
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False) as client:
        model = None
        while model is None:
            _pause(process, deadline, "list its models")
            model = _first_model(client)
        listening = perf_counter() - start
        while not _answers(client, model):
            _pause(process, deadline, "answer a chat request")
    return model, {"listening": listening, "first_answer": perf_counter() - start - listening}


def _pause(process: subprocess.Popen[bytes], deadline: float, doing: str) -> None:
    if process.poll() is not None:
        raise RaylmError(f"the server ended with exit code {process.returncode} before it could {doing}")
    if perf_counter() > deadline:
        raise RaylmError(f"the server did not {doing} in time")
    time.sleep(_POLL_S)


def _first_model(client: httpx.Client) -> str | None:
    import httpx

    try:
        response = client.get("/models")
    except httpx.TransportError:
        return None
    if response.status_code == 401:
        raise RaylmError(f"the server refused to list its models with 401: {response.text[:300]}")
    models = response.json()["data"] if response.status_code == 200 else []
    return str(models[0]["id"]) if models else None


def _answers(client: httpx.Client, model: str) -> bool:
    import httpx

    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    try:
        response = client.post("/chat/completions", json=body)
    except httpx.TransportError:
        return False
    if response.status_code == 200:
        return True
    if response.status_code < 500:
        raise RaylmError(f"the server refused a chat request with {response.status_code}: {response.text[:300]}")
    return False


def _stop(process: subprocess.Popen[bytes]) -> float:
    start = perf_counter()
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RaylmError(f"the server did not end within {_STOP_TIMEOUT_S:g} s of SIGTERM") from None
    return perf_counter() - start


def _told_parts(log: IO[bytes]) -> dict[str, float]:
    log.seek(0)
    parts: dict[str, float] = {}
    for whose, told in _PARTS.findall(log.read()):
        for part in told.decode().split(", "):
            name, _, seconds = part.rpartition(" ")
            parts[f"{whose.decode()}{name}"] = float(seconds)
    return parts


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    text = log.read()[-_TAIL_BYTES:].decode(errors="replace").strip()
    return f"; its last words:\n{text}" if text else ""
