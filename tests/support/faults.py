"""Faults of a served model: what is killed, when its clients hear of it, when it answers again, what is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import psutil
from openai import OpenAI

from tests.support.ports import free_port

MODEL = "tiny"
_HOOKS = Path(__file__).parent / "hooks"
_START_S = 300
_RECOVERY_S = 300
_POLL_S = 0.1


class EngineProcesses(NamedTuple):
    """The processes of one replica; `workers` in the order of their ranks."""

    replica: psutil.Process
    engine: psutil.Process
    workers: list[psutil.Process]
    raylet: psutil.Process

    @property
    def all(self) -> list[psutil.Process]:
        return [self.replica, self.engine, *self.workers]


class Heard(NamedTuple):
    """How a request ended: when, after how many events, and with which error; None if it had an answer."""

    at: float
    events: int
    error: openai.APIError | None


class Measured(NamedTuple):
    """Seconds from a fault until the last client heard of it, and until the next good answer."""

    detected_s: float
    recovered_s: float
    heard: list[Heard]


class FaultCluster:
    """tests/support/fault_cluster.py in a process and a temporary folder of its own."""

    def __init__(self, engine: str) -> None:
        """`engine` is the YAML of an engine file; its model.name is MODEL."""
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        config, port = self.folder / "engine.yaml", free_port()
        config.write_text(engine)
        self.url = f"http://127.0.0.1:{port}"
        # Ray's files and the engine's are below TMPDIR, so that what is left can be told from others'.
        paths = [str(_HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "TMPDIR": str(self.folder), "PYTHONPATH": os.pathsep.join(paths)}
        environment |= {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
            "RAY_preload_python_modules": "raylm.serving.program.lean",
        }
        self._log = (self.folder / "log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fault_cluster", str(config), str(port)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self._root = psutil.Process(self._process.pid)

    def family(self) -> list[psutil.Process]:
        """Every process of the cluster, zombies too."""
        return self._root.children(recursive=True)

    def wait_until_ready(self) -> None:
        wait_for(lambda: "\nready\n" in f"\n{self.log()}" or self._process.poll() is not None, _START_S, self.log)
        assert self._process.poll() is None, self.log()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def processes(self) -> EngineProcesses | None:
        """Those of the engine; None while there is not exactly one that is whole."""
        found: dict[str, list[psutil.Process]] = {"Replica": [], "Engine": [], "Worker": []}
        for process in self.family():
            title = _title(process)
            for name, mark in (("Replica", ":ModelReplica"), ("Engine", "::EngineActor"), ("Worker", "::WorkerActor")):
                if mark in title:
                    found[name].append(process)
        if [len(group) for group in found.values()] != [1, 1, 2]:
            return None
        replica, engine = found["Replica"][0], found["Engine"][0]
        raylet = replica.parent()
        workers = sorted(found["Worker"], key=_is_rank_0, reverse=True)
        return EngineProcesses(replica, engine, workers, raylet) if raylet is not None else None

    def step_folders(self) -> list[Path]:
        return list(self.folder.glob("raylm-steps-*"))

    def close(self) -> list[psutil.Process]:
        """End it; returns the processes that had to be killed. May be called twice."""
        if self._log.closed:
            return []
        family = self.family()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(180)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(family, timeout=60)
        for process in alive:
            process.kill()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return alive


class Witness:
    """Clients of a model: some that wait for answers, and one that asks again and again."""

    def __init__(self, url: str) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self._url = url

    def close(self) -> None:
        self._client.close()

    def answers(self) -> bool:
        """Whether a short request has an answer. An error must be one that a client can come back after."""
        try:
            answer = self._client.completions.create(model=MODEL, prompt="The sea", max_tokens=4, temperature=0)
        except openai.InternalServerError as error:
            assert error.status_code == 503 and error.body["message"], error
            return False
        return answer.choices[0].finish_reason in ("stop", "length")

    def is_healthy(self) -> bool:
        return httpx.get(f"{self._url}/ready", timeout=30).status_code == 200

    def measure(self, inject: Callable[[], None]) -> Measured:
        """Two streams, a chat and a whole answer run when the fault comes."""
        begun = [threading.Event() for _ in range(3)]
        with ThreadPoolExecutor(4) as pool:
            live = [pool.submit(self._stream, index, event) for index, event in enumerate(begun)]
            live.append(pool.submit(self._whole))
            for event in begun:
                assert event.wait(120), "a stream has not begun"
            wait_for(lambda: self._num_running() == len(live), 120)
            at = time.monotonic()
            inject()
            heard = [future.result() for future in live]
        wait_for(self.answers, _RECOVERY_S)
        return Measured(max(one.at for one in heard) - at, time.monotonic() - at, heard)

    def measure_idle(self, inject: Callable[[], None]) -> Measured:
        """Nobody asks anything when the fault comes."""
        at = time.monotonic()
        inject()
        wait_for(lambda: not self.is_healthy(), _RECOVERY_S)
        detected = time.monotonic()
        wait_for(self.answers, _RECOVERY_S)
        return Measured(detected - at, time.monotonic() - at, [])

    def _num_running(self) -> float:
        lines = httpx.get(f"{self._url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("raylm:num_requests_running{"))

    def _stream(self, index: int, begun: threading.Event) -> Heard:
        options = {"model": MODEL, "stream": True, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        events = 0
        try:
            if index == 0:
                message = {"role": "user", "content": "A"}
                stream = self._client.chat.completions.create(messages=[message], **options)
            else:
                stream = self._client.completions.create(prompt="A", **options)
            for _ in stream:
                events += 1
                begun.set()
        except openai.APIError as error:
            return Heard(time.monotonic(), events, error)
        return Heard(time.monotonic(), events, None)

    def _whole(self) -> Heard:
        try:
            self._client.completions.create(model=MODEL, prompt="B", max_tokens=4000, extra_body={"ignore_eos": True})
        except openai.APIError as error:
            return Heard(time.monotonic(), 0, error)
        return Heard(time.monotonic(), 1, None)


class Remains:
    """What the processes of an engine have that others must not find when they are gone."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self._ports = {port for process in processes for port in _ports(process)}
        self._shared = {
            Path(found.path)
            for process in processes
            for found in process.memory_maps()
            if found.path.startswith("/dev/shm/") and "(deleted)" not in found.path
        }

    def find(self, cluster: FaultCluster) -> list[str]:
        """What is left, in words: processes (zombies too), ports, shared memory, folders."""
        _, alive = psutil.wait_procs(self._processes, timeout=60)
        left = [f"process {process.pid} ({_title(process)}, {process.status()})" for process in alive]
        own = {id(process) for process in alive}
        left += [f"folder {folder}" for folder in cluster.step_folders()]
        left += [f"shared memory {path}" for path in self._shared if path.exists()]
        new = cluster.processes()
        successors = {process.pid for process in new.all} if new is not None else set()
        for process in cluster.family():
            if process.pid not in successors and id(process) not in own:
                left += [f"port {port} of {process.pid}" for port in _ports(process) & self._ports]
        return left


@contextmanager
def fault_cluster(engine: str) -> Iterator[FaultCluster]:
    """A cluster that serves; nothing of it is left afterwards."""
    cluster = FaultCluster(engine)
    left: list[psutil.Process] = []
    try:
        cluster.wait_until_ready()
        yield cluster
    finally:
        left = cluster.close()
    assert not left, left


def wait_for(condition: Callable[[], object], seconds: float, say: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not come true in {seconds:g} s {say()}"
        time.sleep(_POLL_S)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def _ports(process: psutil.Process) -> set[int]:
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return set()
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def _is_rank_0(process: psutil.Process) -> bool:
    """Rank 0 keeps the store at which the ranks meet, and is a client of it as all are."""
    listens = _ports(process)
    return any(one.raddr and one.raddr.port in listens for one in process.net_connections("tcp"))
