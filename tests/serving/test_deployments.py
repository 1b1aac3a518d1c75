"""The deployment files that need no GPU, run beside the session's application under a path of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
import yaml
from openai import OpenAI

if TYPE_CHECKING:
    from tests.support.served import Served

pytestmark = pytest.mark.serve
SMALL, PRIORITY, SCALED = "smollm2-135m", "smollm2-135m-priority", "smollm2-135m-scaled"
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@contextmanager
def running(file: str, served: Served) -> Iterator[OpenAI]:
    """A client of the endpoint of a file, which runs until the block ends."""
    with open(f"deployments/{file}", encoding="utf-8") as text:
        applications = yaml.safe_load(text)["applications"]
    name = file.removesuffix(".yaml")
    for application in applications:
        application["name"] = f"{name}-{application['name']}"
        application["args"] = {**application.get("args", {}), "endpoint": name}
    applications[0]["route_prefix"] = f"/{name}"
    config = served.changed()
    config["applications"] += applications
    served.deploy(config)
    try:
        with OpenAI(base_url=f"{served.url}/{name}/v1", api_key="none", max_retries=0, timeout=120) as client:
            yield client
    finally:
        served.deploy(served.config)


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.1)


@pytest.mark.nightly
def test_two_models_behind_one_endpoint(served):
    with running("multi-model.yaml", served) as client:
        assert [model.id for model in client.models.list().data] == [SMALL, PRIORITY]
        for name in (SMALL, PRIORITY):
            answer = client.chat.completions.create(model=name, messages=PARIS, temperature=0, max_tokens=16)
            assert "Paris" in answer.choices[0].message.content and answer.model == name
        # Each engine has its own configuration: 1,100 tokens are too many for one of them only.
        long = {"prompt": [7] * 1100, "max_tokens": 1, "temperature": 0}
        assert client.completions.create(model=SMALL, **long).usage.prompt_tokens == 1100
        with pytest.raises(openai.BadRequestError, match="1024"):
            client.completions.create(model=PRIORITY, **long)
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="smollm2-135", prompt="A", max_tokens=1)
        assert caught.value.body["code"] == "model_not_found" and caught.value.body["param"] == "model"
        assert "smollm2-135" in caught.value.body["message"]


@pytest.mark.nightly
def test_a_queue_brings_a_second_replica(served):
    with running("autoscale.yaml", served) as client:
        metrics = f"{str(client.base_url).removesuffix('/v1/')}/metrics"

        full = threading.Event()

        def engines() -> int:
            lines = httpx.get(metrics, timeout=30).text.splitlines()
            return sum(line.startswith("raylm:num_requests_running{") for line in lines)

        def ask(_: int) -> str:
            body = {"model": SCALED, "prompt": "A", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
            with client.completions.create(**body, stream=True) as stream:
                for _ in stream:
                    if full.is_set():
                        return "enough"
            return "done"

        assert engines() == 1
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(ask, index) for index in range(12)]
            try:
                wait_for(lambda: engines() == 2, seconds=180)
            finally:
                full.set()
            assert all(answer.result() for answer in answers)
