"""`serve deploy` of a changed file: nothing restarts but the changed model, and no request is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.support import checkpoints

if TYPE_CHECKING:
    from tests.support.served import Served

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]
DEMO = "smollm2-135m"
NUM_STREAMS = 2
PAUSE_S = 2.0
"""Of each reader after a stream: what is deployed needs the processors too."""


class Load:
    """Streams of the demo model, one after another on several connections, each shorter than the drain."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._enough = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._readers: list[Future[int]] = []
        self._begun = threading.Barrier(NUM_STREAMS + 1, timeout=240)

    def start(self) -> None:
        """Returns when each has its first event."""
        self._readers = [self._pool.submit(self._run) for _ in range(NUM_STREAMS)]
        self._begun.wait()

    def stop(self) -> int:
        """The number of streams, all of which have ended well; raises what ended one otherwise."""
        self._enough.set()
        self._pool.shutdown()
        return sum(reader.result() for reader in self._readers)

    def _run(self) -> int:
        done = 0
        while not self._enough.is_set():
            self._stream(is_first=done == 0)
            done += 1
            self._enough.wait(PAUSE_S)
        return done

    def _stream(self, *, is_first: bool) -> None:
        body = {"model": DEMO, "prompt": "A", "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            first = next(lines)
            if is_first:
                self._begun.wait()
            events = [line for line in (first, *lines) if line]
        assert events[-1] == "data: [DONE]" and '"length"' in events[-2], events[-2:]


@contextmanager
def under_load(url: str) -> Iterator[None]:
    """No stream is lost until the block ends."""
    load = Load(url)
    load.start()
    try:
        yield
    finally:
        done = load.stop()
    assert done >= NUM_STREAMS


def replicas() -> dict[str, set[int]]:
    """The pids of the replicas of each application, as Serve gives them."""
    from ray.serve.context import _get_global_client

    applications: dict[str, Any] = _get_global_client().get_serve_details()["applications"]
    return {
        name: {
            replica["pid"]
            for deployment in application["deployments"].values()
            for replica in deployment["replicas"]
            if replica["state"] == "RUNNING"
        }
        for name, application in applications.items()
    }


def engines() -> set[int]:
    """The pids of engines and workers, whichever model's."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline()[:1])
        except psutil.Error:
            continue
        if "EngineActor" in title or "WorkerActor" in title:
            found.add(process.pid)
    return found


def with_replicas(served: Served, number: int) -> dict[str, Any]:
    config = served.changed()
    for application in config["applications"]:
        application["deployments"][0]["num_replicas"] = number
    return config


def with_model(config: dict[str, Any], folder: str, **args: object) -> dict[str, Any]:
    """The configuration with a second, small model."""
    engine = {"model": {"path": folder, "name": "tiny", "load_format": "dummy"}, "cache": {"cpu_memory_gib": 0.05}}
    application = {"name": "tiny", "route_prefix": None, "import_path": "raylm.serving.app:build_model"}
    return {**config, "applications": [*config["applications"], {**application, "args": {"engine": engine, **args}}]}


def names(url: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=30).json()["data"]]


def status_of(url: str, model: str, prompt_tokens: int = 1) -> int:
    body = {"model": model, "prompt": [5] * prompt_tokens, "max_tokens": 1}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code


@contextmanager
def long_stream(url: str, model: str, tokens: int) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun, longer than the drain."""
    body = {"model": model, "prompt": "A", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert "error" not in next(lines)
        yield lines


def assert_told(events: Iterator[str], code: str, message: str) -> None:
    """The stream ends with an error event."""
    *_, told, done = events
    error = json.loads(told.removeprefix("data: "))["error"]
    assert done == "data: [DONE]" and error["code"] == code and message in error["message"], error


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        threading.Event().wait(0.1)
    raise AssertionError("the condition did not come true")


@pytest.fixture
def unchanged(served: Served) -> Iterator[dict[str, Any]]:
    """The session's configuration, which is deployed again at the end."""
    yield served.changed()
    served.deploy(served.config)


@pytest.mark.nightly
def test_another_number_of_replicas_restarts_nothing(served: Served, unchanged: dict[str, Any]) -> None:
    before, kept = replicas(), engines()
    with under_load(served.url):
        served.deploy(with_replicas(served, 2))
        more = replicas()
        assert {name: len(pids) for name, pids in more.items()} == {"llm": 2, DEMO: 2}
        assert all(before[name] < more[name] for name in before)
        assert kept < engines()
        served.deploy(unchanged)
    fewer = replicas()
    assert all(len(fewer[name]) == 1 and fewer[name] < more[name] for name in before)


def test_a_model_comes_changes_and_goes_alone(
    served: Served, unchanged: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, changed = (
        str(checkpoints.llama(tmp_path_factory.mktemp(name), max_position_embeddings=32768))
        for name in ("llama", "changed")
    )
    before, kept = replicas(), engines()
    with under_load(served.url):
        assert status_of(served.url, "tiny") == 404
        served.deploy(with_model(unchanged, folder, drain_timeout_s=1))
        assert names(served.url) == [DEMO, "tiny"] and status_of(served.url, "tiny") == 200
        # Each engine has its own configuration: so long a prompt is too long for one of them only.
        assert [status_of(served.url, name, 2100) for name in (DEMO, "tiny")] == [400, 200]
        first = replicas()
        assert first | before == first
        with long_stream(served.url, "tiny", 32000):  # The drain does not wait for it.
            served.deploy(with_model(unchanged, changed, drain_timeout_s=5))
        second = replicas()
        assert second["tiny"].isdisjoint(first["tiny"]) and second | before == second
        assert status_of(served.url, "tiny") == 200
        served.deploy(unchanged)
        # The last replica drains, then Serve is asked whether the application is still there.
        wait_for(lambda: status_of(served.url, "tiny") == 404)
        assert names(served.url) == [DEMO]
    wait_for(lambda: replicas() == before and engines() == kept)
    assert httpx.get(f"{served.url}/ready", timeout=30).status_code == 200


@pytest.mark.nightly
def test_a_stream_that_outlives_the_drain_of_its_model_is_told(
    served: Served, unchanged: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After routing.failover_wait_s, a minute: until then another engine of the same model could come."""
    folder, changed = (
        str(checkpoints.llama(tmp_path_factory.mktemp(name), max_position_embeddings=32768))
        for name in ("llama", "changed")
    )
    served.deploy(with_model(unchanged, folder, drain_timeout_s=1))
    with long_stream(served.url, "tiny", 32000) as events:
        served.deploy(with_model(unchanged, changed, drain_timeout_s=1))
        assert_told(events, "engine_stopped", "the replica's drain is over")


@pytest.mark.nightly
def test_an_ingress_that_goes_tells_the_streams_that_outlive_its_drain(
    served: Served, unchanged: dict[str, Any]
) -> None:
    brief = served.changed()
    brief["applications"][0]["args"]["drain_timeout_s"] = 1
    served.deploy(brief)
    kept = engines()
    with long_stream(served.url, DEMO, 1900) as events:
        served.deploy(unchanged)
        assert_told(events, "server_stopped", "the ingress is being stopped, and its drain of 1 s is over")
    assert engines() == kept
