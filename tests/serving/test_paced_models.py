"""Models that sleep, that cannot start, that come and go, on real Serve; their engines have no model."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import yaml

from raylm.serving.autoscaling import POLICY_PATH
from tests.serving.load_step import AS_DOCUMENTED, Seen, ask, config, measure
from tests.support import checkpoints
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line
from tests.support.served import Served

pytestmark = [pytest.mark.nightly, pytest.mark.serve, pytest.mark.timeout(900)]

HELD = 40
HOLD_S = 3.0
SLEEPS: dict[str, Any] = {
    "min_replicas": 0,
    "initial_replicas": 1,
    "max_replicas": 1,
    "downscale_delay_s": 1,
    "look_back_period_s": 10,
    "policy": {"policy_function": POLICY_PATH},
}


def paced(name: str, path: str = "smollm2-135m", *, autoscaling: dict[str, Any] | None = None) -> dict[str, Any]:
    """An application of a paced model: 20 ms a step, two seconds a start."""
    deployment: dict[str, Any] = {"name": "ModelReplica"}
    if autoscaling is not None:
        deployment["autoscaling_config"] = autoscaling
    engine = {"model": {"path": path, "name": name, "max_model_len": 4096}, "scheduler": {"max_num_seqs": 64}}
    return {
        "name": name,
        "route_prefix": None,
        "import_path": "tests.support.paced:build_paced",
        "args": {"engine": engine, "cost": "20:0:0:0", "start_s": 2.0},
        "deployments": [deployment],
    }


def details() -> dict[str, Any]:
    from ray.serve.context import _get_global_client

    applications: dict[str, Any] = _get_global_client().get_serve_details()["applications"]
    return applications


def target(name: str) -> int:
    """How many replicas Serve wants of an application."""
    found: int = details()[name]["deployments"]["ModelReplica"]["target_num_replicas"]
    return found


def pids(name: str) -> set[int]:
    return {replica["pid"] for replica in details()[name]["deployments"]["ModelReplica"]["replicas"]}


def until(condition: Callable[[], bool], seconds: float = 120, every_s: float = 0.1) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        threading.Event().wait(every_s)


def submit(content: dict[str, Any]) -> None:
    """Deploy without waiting for what may fail."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(content), _blocking=False)


def at_once(url: str, number: int, seen: Seen, *, model: str, tokens: int = 5) -> None:
    async def send() -> None:
        async with session() as client:
            await asyncio.gather(*(ask(client, url, seen, model=model, tokens=tokens) for _ in range(number)))

    asyncio.run(send())


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300))


def ready(url: str, model: str | None = None) -> tuple[int, dict[str, str]]:
    answer = httpx.get(f"{url}/ready", params={} if model is None else {"model": model}, timeout=30)
    return answer.status_code, answer.json()["models"]


def refusal(url: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": [5], "max_tokens": 1}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


@pytest.fixture
def base(served: Served) -> Iterator[dict[str, Any]]:
    """The session's configuration with a short patience; it is as before at the end."""
    content = served.changed()
    content["applications"][0]["args"]["routing"] = {"hold_s": HOLD_S, "wake_s": 200.0, "max_held_requests": HELD}
    yield content
    served.deploy(served.config)


def test_a_model_sleeps_and_wakes_and_nobody_is_lost(
    served: Served, base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = checkpoints.llama(tmp_path_factory.mktemp("frail"), max_position_embeddings=32768)
    base["applications"] += [
        paced("sleeper", autoscaling=SLEEPS),
        paced("frail", str(folder), autoscaling=SLEEPS),
    ]
    served.deploy(base)
    until(lambda: target("sleeper") == 0 and not pids("sleeper"), every_s=0.5)
    assert ready(served.url)[0] == 200, "a model that sleeps is no fault"
    # More than may wait: the rest is refused at once, and who waits sees comments.
    seen = Seen()
    at_once(served.url, HELD + 10, seen, model="sleeper")
    assert seen.whole == HELD and seen.comments >= HELD, seen
    assert len(seen.wrong) == 10 and all(f"routing.max_held_requests allows {HELD}" in each for each in seen.wrong)
    print(f"waking took {seen.longest_wait_s:.1f} s")
    # Those that come as it goes are served, by the one that goes or by the next.
    until(lambda: target("sleeper") == 0, every_s=0.02)
    seen = Seen()
    asyncio.run(trickle(served.url, seen, "sleeper", 30))
    assert seen.whole == 30 and not seen.wrong, seen
    # A start that fails is told within the time that others wait at most.
    until(lambda: target("frail") == 0 and not pids("frail"), every_s=0.5)
    shutil.rmtree(folder)
    begin = time.monotonic()
    answer = refusal(served.url, "frail")
    print(f"a failed start was told after {time.monotonic() - begin:.1f} s: {answer.text}")
    assert answer.status_code == 503 and "its last start failed: " in answer.text and "retry-after" in answer.headers


async def trickle(url: str, seen: Seen, model: str, number: int) -> None:
    """A request every 100 ms, each on its own."""
    async with session() as client, asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(ask(client, url, seen, model=model, tokens=5))
            await asyncio.sleep(0.1)


def test_models_come_go_and_fail_beside_one_that_streams(served: Served, base: dict[str, Any], tmp_path: Path) -> None:
    demo = served.config["applications"][1]["name"]
    before = {**base, "applications": [*base["applications"], paced("steady"), paced("goes")]}
    served.deploy(before)
    kept, seen = pids("steady"), Seen()
    streams = threading.Thread(target=at_once, args=(served.url, 3, seen), kwargs={"model": "steady", "tokens": 2000})
    streams.start()
    unbuilt = {**paced("unbuilt", str(tmp_path / "nothing")), "import_path": "raylm.serving.app:build_model"}
    del unbuilt["args"]["cost"], unbuilt["args"]["start_s"]
    after = [
        *base["applications"],
        paced("steady"),
        paced("comes"),
        paced("broken", str(tmp_path / "nothing")),
        unbuilt,
    ]
    submit({**base, "applications": after})
    until(lambda: ready(served.url, "comes")[0] == 200)
    until(lambda: details()["unbuilt"]["status"] == details()["broken"]["status"] == "DEPLOY_FAILED")
    until(lambda: ready(served.url, "goes")[0] == 404)
    status, models = ready(served.url)
    assert status == 503 and models.pop("broken").startswith("its last start failed: ")
    assert models == {demo: "ready", "steady": "ready", "comes": "ready"}
    listed = [model["id"] for model in httpx.get(f"{served.url}/v1/models", timeout=30).json()["data"]]
    assert listed == sorted(models)
    answer = refusal(served.url, "broken")
    assert answer.status_code == 503 and "retry-after" in answer.headers
    assert "its last start failed: model.path" in answer.text and "nothing" in answer.text, answer.text
    assert refusal(served.url, "unbuilt").status_code == 404 and refusal(served.url, "steady").status_code == 200
    streams.join()
    assert seen.whole == 3 and pids("steady") == kept, seen
    served.deploy(before)
    assert ready(served.url)[0] == 200 and refusal(served.url, "goes").status_code == 200
    assert refusal(served.url, "broken").status_code == 404 and pids("steady") == kept


def test_a_load_step_brings_a_second_replica_and_takes_it_away_once(demo: None, tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "step.yaml"
    options = AS_DOCUMENTED | {"max_replicas": 2, "downscale_delay_s": 20}
    file.write_text(yaml.safe_dump(config(port, options, start_s=2.0)))
    with running(str(file)) as (process, lines):
        wait_for_line(process, lines, "http://", 180)
        found = asyncio.run(measure(f"http://127.0.0.1:{port}", before_s=10, high_s=60, after_s=300, low=0.3, high=1.6))
    assert [change.replicas for change in found.changes] == [1, 2, 1], found.changes
    assert not found.wrong and found.whole > 200 and len(found.by_engine) == 2
