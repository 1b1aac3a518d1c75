"""An engine with work that finishes no step is replaced; one that is busy, however long its queue, never is.

Engines without a model, behind real Serve: the first step that is asked for takes as long as the cost model says.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

if TYPE_CHECKING:
    from tests.support.served import Served

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600), pytest.mark.nightly]
NAME = "paced"
STEP_TIMEOUT_S = 1.0


@contextmanager
def with_engine(served: Served, cost: str) -> Iterator[str]:
    """The URL of an endpoint that has a paced engine beside what it had."""
    config = served.changed()
    engine = {
        "model": {"path": "smollm2-135m", "name": NAME, "max_model_len": 2048},
        "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 256},
        "runtime": {"step_timeout_s": STEP_TIMEOUT_S},
    }
    application: dict[str, Any] = {
        "name": NAME,
        "route_prefix": None,
        "import_path": "tests.support.paced:build_paced",
        "args": {"engine": engine, "cost": cost, "drain_timeout_s": 1.0},
    }
    config["applications"].append(application)
    served.deploy(config)
    try:
        yield served.url
    finally:
        served.deploy(served.changed())


def complete(url: str, num_tokens: int) -> httpx.Response:
    body = {"model": NAME, "prompt": [5] * 300, "max_tokens": num_tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def engine_ids(url: str) -> set[str]:
    models = httpx.get(f"{url}/state", timeout=30).json()["models"]
    return {each["engine"] for model in models if model["model"] == NAME for each in model["engines"]}


def test_an_engine_whose_thread_hangs_in_a_step_is_replaced(served: Served) -> None:
    # A step of 1,000 s, which the executor of a paced engine waits for without a limit.
    with with_engine(served, "1000000:0:0:0") as url:
        before = engine_ids(url)
        begin = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(complete, url, 4)
            while engine_ids(url) & before:
                assert time.monotonic() - begin < 120, "the engine that hangs is still there"
                time.sleep(0.5)
            assert time.monotonic() - begin > STEP_TIMEOUT_S
            while not engine_ids(url) or httpx.get(f"{url}/ready?model={NAME}", timeout=60).status_code != 200:
                assert time.monotonic() - begin < 180, "no other engine came"
                time.sleep(0.5)
            asked.cancel()
            served.deploy(served.changed())  # It may wait for a successor, which would hang as well.
        assert asked.cancelled() or asked.result().status_code == 503


def test_an_engine_that_is_stopped_while_idle_is_replaced(served: Served) -> None:
    with with_engine(served, "10:0:0:0") as url:
        assert complete(url, 4).status_code == 200
        before = engine_ids(url)
        stacks = httpx.post(f"{url}/v1/admin/stacks?model={NAME}", timeout=60).json()["processes"]
        (pid,) = [each["pid"] for each in stacks if each["process"].startswith(f"engine {min(before)}")]
        stopped = psutil.Process(pid)
        stopped.send_signal(signal.SIGSTOP)
        stacks = httpx.post(f"{url}/v1/admin/stacks?model={NAME}", timeout=60).json()["processes"]
        (silent,) = [each for each in stacks if each["process"].startswith(f"engine {min(before)}")]
        assert silent["error"].startswith("it has not answered within 10 s")
        begin = time.monotonic()
        while engine_ids(url) & before or httpx.get(f"{url}/ready?model={NAME}", timeout=60).status_code != 200:
            assert time.monotonic() - begin < 120, "no other engine came"
            time.sleep(0.5)
        assert complete(url, 4).status_code == 200
        stopped.wait(30)


def test_a_saturated_engine_is_left_alone(served: Served) -> None:
    """Steps just within their limit, for twice as long as a hang may last, with a queue that never ends."""
    with with_engine(served, "900:0:0:0") as url:
        before = engine_ids(url)
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda _: complete(url, 10), range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        assert engine_ids(url) == before
