"""What an operator tells engines over HTTP: whom it reaches, what is refused, how failures are told."""

from __future__ import annotations

import pytest

from raylm.core.control import ResetCache, StartProfile, StopProfile
from raylm.errors import EngineDeadError, RequestRejected
from tests.support.openai_fakes import Server

WORKERS = ["rank 0", "rank 1"]


async def test_all_engines_are_told_and_all_workers_answer() -> None:
    server = Server()
    response = await server.http.post("/reset_prefix_cache?reset_running_requests=false")
    assert (response.status_code, response.json()) == (
        200,
        {
            "engines": [
                {"model": "tiny", "engine": "engine-0", "workers": WORKERS},
                {"model": "tiny", "engine": "engine-1", "workers": WORKERS},
            ]
        },
    )
    assert (await server.http.post("/start_profile?num_steps=30", content=b"{}")).status_code == 200
    assert (await server.http.post("/stop_profile?model=tiny")).status_code == 200
    assert [engine.told for engine in server.catalog.handles] == [
        [ResetCache(), StartProfile(num_steps=30), StopProfile()]
    ] * 2


async def test_one_engine_may_be_meant() -> None:
    server = Server()
    assert (await server.http.post("/start_profile?engine=engine-1")).status_code == 200
    assert [engine.told for engine in server.catalog.handles] == [[], [StartProfile()]]


async def test_what_one_engine_fails_at_stands_beside_what_the_other_did() -> None:
    server = Server()
    server.catalog.handles[0].error = EngineDeadError("worker 1 died")
    response = await server.http.post("/stop_profile")
    assert response.status_code == 200
    first, second = response.json()["engines"]
    assert first == {"model": "tiny", "engine": "engine-0", "error": "worker 1 died"}
    assert second["workers"] == WORKERS


@pytest.mark.parametrize(
    ("error", "status"), [(RequestRejected("there is no place for it"), 400), (EngineDeadError("it died"), 503)]
)
async def test_what_all_fail_at_is_an_error(error: Exception, status: int) -> None:
    server = Server()
    for engine in server.catalog.handles:
        engine.error = error
    response = await server.http.post("/start_profile")
    assert (response.status_code, response.json()["error"]["message"]) == (status, str(error))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/start_profile?num_steps=0", "num_steps must be a number of 1 to 1000, got '0'"),
        ("/start_profile?num_steps=1001", "num_steps must be a number of 1 to 1000, got '1001'"),
        ("/start_profile?num_steps=ten", "num_steps must be a number of 1 to 1000, got 'ten'"),
        ("/start_profile?steps=1", "'steps' is unknown in the query; allowed: "),
        ("/stop_profile?engine=nobody", "the engine 'nobody' does not exist"),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_running_requests must be false"),
        ("/v1/admin/stacks?engine=engine-0", "'engine' is unknown in the query"),
    ],
)
async def test_what_is_refused(path: str, message: str) -> None:
    server = Server()
    response = await server.http.post(path)
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(message)
    assert [engine.told for engine in server.catalog.handles] == [[], []]


async def test_an_unknown_model_is_not_found() -> None:
    for path in ("/stop_profile", "/reset_prefix_cache", "/v1/admin/stacks"):
        response = await Server().http.post(f"{path}?model=nobody")
        assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


async def test_a_body_is_refused() -> None:
    response = await Server().http.post("/start_profile", content=b'{"num_steps": 3}')
    assert response.status_code == 400 and "has no body" in response.json()["error"]["message"]


async def test_a_model_without_engines_is_told_later() -> None:
    response = await Server().http.post("/reset_prefix_cache?model=late")
    assert response.status_code == 503 and response.headers["retry-after"]


async def test_stacks_of_the_models_that_are_meant() -> None:
    response = await Server().http.post("/v1/admin/stacks?model=late")
    assert response.json() == {
        "processes": [{"process": "engine of late", "node": "node", "pid": 7, "stacks": "thread main\n", "error": None}]
    }
