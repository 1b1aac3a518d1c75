"""What an operator tells a running server: to forget its prefix cache, to record a profile, to show what it does."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

if TYPE_CHECKING:
    from tests.support.served import Served

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]
DEMO = "smollm2-135m"


def tell(served: Served, path: str) -> httpx.Response:
    return httpx.post(f"{served.url}{path}", timeout=120)


def complete(served: Served, prompt: list[int], num_tokens: int = 4) -> dict[str, Any]:
    body = {"model": DEMO, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_a_cache_that_was_reset_has_nothing(served: Served) -> None:
    prompt = list(range(1000, 1100))
    first = complete(served, prompt)
    assert cached(complete(served, prompt)) > 0
    answer = tell(served, "/reset_prefix_cache")
    assert answer.status_code == 200 and answer.json()["engines"][0]["model"] == DEMO
    again = complete(served, prompt)
    assert cached(again) == 0 and again["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_profile_of_a_live_engine(served: Served) -> None:
    with_it = threading.Thread(target=complete, args=(served, [5, 6, 7], 20))
    with_it.start()
    assert tell(served, f"/start_profile?model={DEMO}").json()["engines"][0]["workers"] == ["recording"]
    complete(served, [8, 9])
    (found,) = tell(served, "/stop_profile").json()["engines"]
    with_it.join()
    (path,) = map(Path, found["workers"])
    assert path.stat().st_size > 1000 and path.name.startswith("worker-0-")


def processes(served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tell(served, "/v1/admin/stacks").json()["processes"]
    return found


def one(found: list[dict[str, Any]], part: str) -> dict[str, Any]:
    (process,) = [each for each in found if part in each["process"]]
    return process


def test_every_process_shows_what_it_does(served: Served) -> None:
    found = processes(served)
    assert [each["error"] for each in found] == [None] * len(found)
    assert "thread MainThread" in one(found, "#OpenAIIngress#")["stacks"]
    assert "thread MainThread" in one(found, "#ModelReplica#")["stacks"]
    worker = one(found, "worker 0 of 1, engine")
    assert "in serve_steps" in worker["stacks"]
    (engine,) = [each for each in found if each["process"].startswith("engine ")]
    assert "thread raylm-engine" in engine["stacks"]
    assert len({each["pid"] for each in found}) == 4


def test_a_worker_that_is_stopped_is_told_of(served: Served) -> None:
    worker = psutil.Process(one(processes(served), "worker 0 of 1")["pid"])
    worker.send_signal(signal.SIGSTOP)
    try:
        found = processes(served)
    finally:
        worker.send_signal(signal.SIGCONT)
    silent = one(found, "worker 0 of 1")
    assert (silent["pid"], silent["stacks"]) == (worker.pid, "")
    assert silent["error"] == "it has not answered within 5 s"
    assert [each["error"] for each in found if each is not silent] == [None] * 3
    complete(served, [8, 9])
