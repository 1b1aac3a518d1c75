"""Streams of a served model whose engine is killed: they wait for its successor and go on.

pytest tests/serving/test_failover_served.py -m "nightly or not nightly" -o log_cli=true -o log_cli_level=INFO
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.titled import titled

if TYPE_CHECKING:
    from tests.support.served import Served

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]
logger = logging.getLogger(__name__)
MODEL = "smollm2-135m"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": SCHEMA, "strict": True, "description": "Looks a city up."},
}
TEXT = {"prompt": "The history of the city of Rome begins", "max_tokens": 60, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 60}
WISHES: dict[str, dict[str, Any]] = {
    "greedy": TEXT | {"temperature": 0, "max_tokens": 90},
    "seeded": TEXT | {"temperature": 1, "seed": 7},
    "three": TEXT | {"temperature": 1, "seed": 7, "n": 3, "max_tokens": 30},
    "stop string": TEXT | {"temperature": 0, "stop": [" was", "\n\n\n\n"]},
    "penalties": TEXT | {"temperature": 0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "logprobs": TEXT | {"temperature": 0, "logprobs": 2},
    "schema": CHAT
    | {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}},
    "tools": CHAT
    | {"temperature": 0, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    "beams": TEXT | {"temperature": 0, "use_beam_search": True, "n": 2, "max_tokens": 16},
}  # fmt: skip


FEW = {name: WISHES[name] for name in ("greedy", "seeded", "three", "tools")}


class Heard:
    """One stream, whole."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, Any] = {}
        self.longest_gap_s = 0.0

    def take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        if event.get("usage"):
            self.usage = {name: event["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        for choice in event["choices"]:
            whole = self.choices.setdefault(choice["index"], {"text": "", "calls": "", "tokens": [], "finish": None})
            delta = choice.get("delta", {})
            whole["text"] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                whole["calls"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            if choice.get("logprobs"):
                whole["tokens"] += choice["logprobs"]["tokens"]
            whole["finish"] = choice["finish_reason"] or whole["finish"]

    @property
    def said(self) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
        return self.choices, self.usage


def listen(url: str, wish: dict[str, Any], begun: threading.Event) -> Heard:
    path = "chat/completions" if "messages" in wish else "completions"
    body = wish | {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    heard, last = Heard(), time.monotonic()
    deadline = last + 120
    # The queue is short: who comes while it is full with those who go on asks again, as OpenAI's clients do.
    while (refused := _refused(url, path, body, heard, begun, last)) and time.monotonic() < deadline:
        time.sleep(1)
    assert not refused, refused
    return heard


def _refused(
    url: str, path: str, body: dict[str, Any], heard: Heard, begun: threading.Event, last: float
) -> bytes | None:
    """Listen to one stream; what it was refused with, where it was."""
    with httpx.stream("POST", f"{url}/v1/{path}", json=body, timeout=180) as answer:
        if answer.status_code == 503 and "retry-after" in answer.headers:
            return answer.read()
        assert answer.status_code == 200, answer.read()
        done = False
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                heard.longest_gap_s, last = max(heard.longest_gap_s, now - last), now
                heard.take(json.loads(line[6:]))
                begun.set()
            done = done or line == "data: [DONE]"
    assert done, "the stream was cut"
    return None


def ask_all(
    url: str, faults: list[str], *, after_s: float = 0.5, wishes: dict[str, dict[str, Any]] = WISHES
) -> dict[str, Heard]:
    """All of these wishes at once, while these processes are killed, one after the other."""
    begun = threading.Event()
    with ThreadPoolExecutor(len(wishes)) as pool:
        asked = {name: pool.submit(listen, url, wish, begun) for name, wish in wishes.items()}
        begun.wait(120)
        for title in faults:
            time.sleep(after_s)
            for process in titled(title):
                process.kill()
            deadline = time.monotonic() + 60
            while not titled("EngineActor") and time.monotonic() < deadline:
                time.sleep(0.1)
        return {name: future.result() for name, future in asked.items()}


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> dict[str, Heard]:
    found = ask_all(served.url, [])
    assert json.loads(found["schema"].choices[0]["text"])
    check_whole(found)
    return found


def check_whole(found: dict[str, Heard]) -> None:
    assert found["tools"].choices[0]["calls"]
    assert all(choice["finish"] for heard in found.values() for choice in heard.choices.values())


def check(name: str, heard: Heard, before: Heard) -> None:
    assert heard.said == before.said, name


def test_streams_go_on_with_the_successor_of_a_killed_engine(served):
    before = ask_all(served.url, [], wishes=FEW)
    check_whole(before)
    check_killed(served, before, wishes=FEW)


def check_killed(served: Served, before: dict[str, Heard], *, wishes: dict[str, dict[str, Any]] = WISHES) -> None:
    """The engine is killed while they run. A busy machine may come to the kill when they have ended: then once more."""
    for _ in range(5):
        found = ask_all(served.url, ["EngineActor"], wishes=wishes)
        for name, heard in found.items():
            check(name, heard, before[name])
        if max(heard.longest_gap_s for heard in found.values()) > 1:
            return
    raise AssertionError("no stream was running when the engine was killed")


@pytest.mark.nightly
def test_streams_of_every_kind_go_on(served, undisturbed):
    check_killed(served, undisturbed)


@pytest.mark.nightly
def test_fifty_kills(served, undisturbed):
    rng, worst, kills = random.Random(4), 0.0, 0
    while kills < 50:
        faults = [rng.choice(["EngineActor", "WorkerActor", "ModelReplica"]) for _ in range(2)]
        found = ask_all(served.url, faults, after_s=rng.uniform(0, 1.5))
        kills += len(faults)
        for name, heard in found.items():
            check(name, heard, undisturbed[name])
        worst = max(worst, *(heard.longest_gap_s for heard in found.values()))
        logger.info("%d kills, the longest gap in a stream %.1f s", kills, worst)
