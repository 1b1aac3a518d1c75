"""What clients see of faults where requests go on at another engine: `raylm serve`, HAProxy, two ingresses, and two
replicas of two tensor ranks each.

    pytest tests/serving/test_faults_with_failover.py -m nightly -o log_cli=true -o log_cli_level=INFO

logs the figures of docs/reliability.md. Open streams are compared token by token with an undisturbed run.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from tests.support import checkpoints
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

pytestmark = [pytest.mark.serve, pytest.mark.nightly, pytest.mark.timeout(1800)]
logger = logging.getLogger(__name__)
MODEL = "tiny"
NUM_STREAMS = 6
LIMIT_S = 150.0
WISHES: list[dict[str, Any]] = [
    {"prompt": "The sea", "temperature": 0, "max_tokens": 300},
    {"prompt": "A small model", "temperature": 1, "seed": 5, "max_tokens": 250},
    {"prompt": "Paged attention", "temperature": 1, "seed": 7, "n": 3, "max_tokens": 120, "frequency_penalty": 0.5},
]
FULL = {"ModelReplica": 2, "EngineActor": 2, "WorkerActor": 4, "OpenAIIngress": 2, "haproxy": 1}
"""Processes of the server when nothing is missing."""
Said = dict[int, list[int]]


def config(model: Path, port: int) -> dict[str, Any]:
    engine = {
        "model": {"path": str(model), "name": MODEL},
        "parallel": {"tensor": 2},
        "cache": {"cpu_memory_gib": 0.05},
        "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 256},
        # It is 60 s on a CPU by default, and the pause of a stopped worker's streams is little else.
        "runtime": {"device": "cpu", "num_threads": 1, "step_timeout_s": 5},
    }
    face = {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "raylm.serving.app:build_ingress",
        "deployments": [{"name": "OpenAIIngress", "num_replicas": 2}],
    }
    served = {
        "name": MODEL,
        "route_prefix": None,
        "import_path": "raylm.serving.app:build_model",
        "args": {"engine": engine},
        "deployments": [{"name": "ModelReplica", "num_replicas": 2}],
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [face, served],
    }


class Heard(NamedTuple):
    """One stream: when it was asked for and when it ended, what ended it where that was no answer, and its longest
    silence."""

    asked: float
    ended: float
    problem: str
    longest_gap_s: float
    said: Said


def listen(url: str, wish: dict[str, Any], begun: Callable[[], None] = lambda: None) -> Heard:
    body = {**wish, "model": MODEL, "stream": True, "ignore_eos": True, "return_token_ids": True}
    asked = last = time.monotonic()
    said: Said = {index: [] for index in range(wish.get("n", 1))}
    gap, done, problem = 0.0, False, ""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
            if answer.status_code != 200:
                problem = f"{answer.status_code}: {answer.read()[:300]!r}"
                return Heard(asked, time.monotonic(), problem, 0.0, said)
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    done = done or line == "data: [DONE]"
                    continue
                now = time.monotonic()
                gap, last = max(gap, now - last), now
                event = json.loads(line[6:])
                problem = problem or event.get("error", {}).get("message", "")
                for choice in event.get("choices", ()):
                    said[choice["index"]] += choice["token_ids"] or []
                begun()
    except httpx.TransportError as error:
        problem = problem or f"{type(error).__name__}: {error}"
    return Heard(asked, time.monotonic(), problem or ("" if done else "the stream was cut"), gap, said)


class Clients:
    """Streams one after another on several connections, and one short request after another beside them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._enough = threading.Event()
        self._begun = threading.Barrier(NUM_STREAMS + 1, timeout=LIMIT_S)
        self._pool = ThreadPoolExecutor(NUM_STREAMS + 1)

    def start(self) -> None:
        """Returns when all streams have begun."""
        self._streams = [self._pool.submit(self._stream, number) for number in range(NUM_STREAMS)]
        self._short = self._pool.submit(self._ask)
        self._begun.wait()

    def stop(self) -> tuple[list[tuple[int, Heard]], list[tuple[float, float, str]]]:
        """All streams with the number of their wish; all short requests: when asked, seconds, problem."""
        self._enough.set()
        self._pool.shutdown()
        return [each for stream in self._streams for each in stream.result()], self._short.result()

    def _stream(self, number: int) -> list[tuple[int, Heard]]:
        found: list[tuple[int, Heard]] = []
        wish, is_first = number % len(WISHES), [True]

        def begun() -> None:
            if is_first:
                is_first.clear()
                self._begun.wait()

        while not self._enough.is_set():
            found.append((wish, listen(self._url, WISHES[wish], begun)))
        return found

    def _ask(self) -> list[tuple[float, float, str]]:
        found = []
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
        while not self._enough.is_set():
            asked, problem = time.monotonic(), ""
            try:
                answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=LIMIT_S)
                problem = "" if answer.status_code == 200 else f"{answer.status_code}: {answer.text[:300]}"
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            found.append((asked, time.monotonic() - asked, problem))
            self._enough.wait(0.05)
        return found


class Server(NamedTuple):
    process: psutil.Process
    url: str
    undisturbed: list[Said]

    def find(self, name: str) -> list[psutil.Process]:
        """Its living processes of this name or title."""
        found = []
        for process in self.process.children(recursive=True):
            try:
                title = " ".join([process.name(), *process.cmdline()[:1]])
                if name in title and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def is_whole(self) -> bool:
        if any(len(self.find(name)) != number for name, number in FULL.items()):
            return False
        try:
            answer = httpx.get(f"{self.url}/state", timeout=10)
            return answer.status_code == 200 and answer.json()["models"][0]["replicas"] == 2
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("faults"), free_port()
    model = checkpoints.llama(folder / MODEL, max_position_embeddings=4096)
    file = folder / "serve.yaml"
    file.write_text(json.dumps(config(model, port)))
    with pytest.MonkeyPatch.context() as patch:
        # Room for everything however few cores there are: what is measured waits for a process, not for its share.
        patch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"CPU": 12}))
        with running(str(file)) as (process, lines):
            wait_for_line(process, lines, "ready:", seconds=400)
            url = f"http://127.0.0.1:{port}"
            whole = [listen(url, wish) for wish in WISHES]
            assert not any(heard.problem for heard in whole), whole
            yield Server(psutil.Process(process.pid), url, [heard.said for heard in whole])


class Fault(NamedTuple):
    """Who gets which signal (0: none), and whether that cuts open streams."""

    victim: str
    number: int
    cuts: bool = False


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS = {
    "nothing, for 20 s": Fault("ray::Directory", 0),
    "kill -9 of an engine": Fault("EngineActor", KILL),
    "kill -9 of a worker": Fault("WorkerActor", KILL),
    "kill -9 of a replica": Fault("ModelReplica", KILL),
    "an engine is stopped (SIGSTOP)": Fault("EngineActor", STOP),
    "a worker is stopped (SIGSTOP)": Fault("WorkerActor", STOP),
    "kill -9 of HAProxy": Fault("haproxy", KILL, cuts=True),
    "kill -9 of one ingress of two": Fault("OpenAIIngress", KILL, cuts=True),
    "kill -9 of the Directory": Fault("ray::Directory", KILL),
    "kill -9 of Serve's controller": Fault("ServeController", KILL),
}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_under_streams(what: str, server: Server) -> None:
    fault = FAULTS[what]
    wait_until(server.is_whole, "the server is not whole before the fault")
    clients = Clients(server.url)
    clients.start()
    victim = server.find(fault.victim)[0]
    at = time.monotonic()
    try:
        victim.send_signal(fault.number)
        wait_until(lambda: has_ended(victim) or (not fault.number and time.monotonic() > at + 20), "the victim lives")
        wait_until(server.is_whole, "the server is not whole again")
        whole_s = time.monotonic() - at
        time.sleep(3)
    finally:
        streams, short = clients.stop()
    report(what, at, streams, short, whole_s)
    for wish, heard in streams:
        expected = server.undisturbed[wish]
        if heard.problem and fault.cuts and heard.asked < at:
            assert all(said == expected[index][: len(said)] for index, said in heard.said.items()), "up to the cut"
        else:
            assert not heard.problem and heard.said == expected, (wish, heard)
    assert not [each for each in short if each[2] and not (fault.cuts and each[0] < at)], short


def report(
    what: str, at: float, streams: list[tuple[int, Heard]], short: list[tuple[float, float, str]], whole_s: float
) -> None:
    """A row of the table: of the streams open at the fault, how many were lost; the longest silence in one of them; of
    later requests (streams and short ones) how many were lost; the slowest later short request; when all was whole."""
    open_ones = [heard for _, heard in streams if heard.asked < at <= heard.ended]
    later = [heard.problem for _, heard in streams if heard.asked >= at] + [each[2] for each in short if each[0] >= at]
    logger.info(
        "| %s | %d of %d | %.1f s | %d of %d | %.1f s | %.1f s |",
        what,
        sum(bool(heard.problem) for heard in open_ones),
        len(open_ones),
        max((heard.longest_gap_s for heard in open_ones if not heard.problem), default=0.0),
        sum(map(bool, later)),
        len(later),
        max((seconds for asked, seconds, _ in short if asked + seconds >= at), default=0.0),
        whole_s,
    )
