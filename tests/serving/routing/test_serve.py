"""Conversations through two real ingresses to four real engines without a model: each goes on where it began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from tests.support.paced_config import paced_config
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

pytestmark = pytest.mark.nightly

ENGINES, INGRESSES = 4, 2
CONVERSATIONS, TURNS = 16, 5
SYSTEM_TOKENS, QUESTION_TOKENS = 400, 80


class Turn(NamedTuple):
    """One answer: of which conversation, from which engine, and how many of the prompt's tokens were cached there."""

    conversation: int
    engine: str
    route: str
    prompt_tokens: int
    cached_tokens: int


def config(port: int, policy: str) -> dict[str, Any]:
    engine = {
        "model": {"path": "smollm2-135m", "name": "m", "max_model_len": 2048},
        "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 2048},
    }
    face = {"routing": {"policy": policy}, "http": {"route_headers": "always"}}
    model = {"engine": engine, "num_blocks": 2048, "cost": "5:20:20:0"}
    return paced_config(port, ingresses=INGRESSES, engines=ENGINES, model=model, face=face)


@pytest.fixture(scope="module", params=["prefix", "round_robin"])
def turns(request: pytest.FixtureRequest, demo: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = tmp_path_factory.mktemp("routing") / "serve.yaml"
    port = free_port()
    Path(file).write_text(yaml.safe_dump(config(port, request.param)))
    with running(str(file)) as (process, lines):
        wait_for_line(process, lines, "http://", 120)
        with ThreadPoolExecutor(CONVERSATIONS) as threads:
            url = f"http://127.0.0.1:{port}/v1/completions"
            found = list(threads.map(lambda number: converse(url, number), range(CONVERSATIONS)))
        yield request.param, [turn for conversation in found for turn in conversation]


def converse(url: str, number: int) -> list[Turn]:
    prompt = [100 + number % 2] * SYSTEM_TOKENS
    turns = []
    for turn in range(TURNS):
        prompt = prompt + [1000 + number * TURNS + turn] * QUESTION_TOKENS
        # On a connection of its own, so that any ingress may get it.
        answer = httpx.post(url, json={"model": "m", "prompt": prompt, "max_tokens": 8}, timeout=60)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        engine, route = answer.headers["x-raylm-engine"], answer.headers["x-raylm-route"]
        turns.append(Turn(number, engine, route, usage["prompt_tokens"], cached))
    return turns


def test_conversations_stay_where_they_began_and_all_engines_work(turns) -> None:
    policy, said = turns
    hit_rate = sum(turn.cached_tokens for turn in said) / sum(turn.prompt_tokens for turn in said)
    moves = sum(
        before.engine != after.engine
        for before, after in zip(said, said[1:], strict=False)
        if before.conversation == after.conversation
    )
    print(f"{policy}: hit rate {hit_rate:.3f}, {moves} moves, {Counter(turn.engine[-4:] for turn in said)}")
    assert len({turn.engine for turn in said}) == ENGINES
    if policy == "prefix":
        assert hit_rate > 0.75 and moves < CONVERSATIONS
        assert {turn.route.partition(";")[0] for turn in said} <= {"prefix", "load"}
    else:
        assert moves > 2 * CONVERSATIONS
        assert {turn.route.partition(";")[0] for turn in said} == {"round_robin"}
