"""A load that rises once and falls again, on real Ray Serve: when replicas come and go, and that nothing is lost.

    python -m tests.serving.load_step --max-replicas 2
    python -m tests.serving.load_step --file deployments/autoscale.yaml

Engines without a model (tests/support/paced.py) behind `raylm serve`: each ends two requests a second and takes ten
seconds to start. The options of the autoscaler are those of the example in docs/deploy.md, or of a file's first scaled
model. Prints a JSON line for each change of the number of replicas, and one at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import yaml

from raylm.serving.autoscaling import POLICY_PATH
from tests.support.paced_config import paced_config, position_token
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

ROWS, PROMPT, OUTPUT = 8, 32, 100
COST = "40:0:0:0"
"""A step of 40 ms: a request takes four seconds, and an engine ends two a second."""
CAPACITY = 2.0
AS_DOCUMENTED: dict[str, Any] = {
    "min_replicas": 1,
    "max_replicas": 4,
    "upscale_delay_s": 5,
    "downscale_delay_s": 120,
    "policy": {"policy_function": POLICY_PATH, "policy_kwargs": {"target_queued_requests": 4}},
}


class Change(NamedTuple):
    """So many engines serve from a time on, in seconds since the step."""

    at: float
    replicas: int


@dataclass
class Seen:
    """What clients saw, and how many engines there were."""

    whole: int = 0
    wrong: list[str] = field(default_factory=list)
    comments: int = 0
    longest_wait_s: float = 0.0
    by_engine: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    @property
    def reversals(self) -> int:
        """How often the number turned from growing to shrinking, or back."""
        ways = [after.replicas > before.replicas for before, after in pairwise(self.changes)]
        return sum(before != after for before, after in pairwise(ways))


def config(port: int, autoscaling: dict[str, Any], start_s: float = 10.0) -> dict[str, Any]:
    engine = {
        "model": {"path": "smollm2-135m", "name": "m", "max_model_len": 2048},
        "scheduler": {"max_num_seqs": ROWS, "max_num_batched_tokens": 2048},
    }
    model = {"engine": engine, "cost": COST, "start_s": start_s}
    content = paced_config(port, ingresses=1, engines=1, model=model, face={"http": {"route_headers": "always"}})
    content["applications"][1]["deployments"] = [{"name": "ModelReplica", "autoscaling_config": autoscaling}]
    return content


async def ask(session: aiohttp.ClientSession, url: str, seen: Seen, *, model: str = "m", tokens: int = OUTPUT) -> None:
    """One stream of a paced model, compared with what it must be."""
    body = {"model": model, "prompt": [7] * PROMPT, "max_tokens": tokens, "stream": True, "return_token_ids": True}
    sent, first, line = time.monotonic(), 0.0, b""
    found: list[int] = []
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                seen.wrong.append(f"{answer.status}: {(await answer.read())[:300]!r}")
                return
            async for line in answer.content:
                if line.startswith(b":"):
                    seen.comments += 1
                elif line.startswith(b"data: {"):
                    first = first or time.monotonic()
                    found += (json.loads(line[6:]).get("choices") or [{}])[0].get("token_ids") or []
            engine = answer.headers.get("x-raylm-engine", "")
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.wrong.append(f"{type(error).__name__}: {error}")
        return
    if found != [position_token(PROMPT + place) for place in range(tokens)]:
        seen.wrong.append(f"of {tokens} tokens came {len(found)}: {line[-300:]!r}")
        return
    seen.whole += 1
    seen.longest_wait_s = max(seen.longest_wait_s, first - sent)
    seen.by_engine[engine] = seen.by_engine.get(engine, 0) + 1


async def send(session: aiohttp.ClientSession, url: str, seen: Seen, rates: Sequence[tuple[float, float]]) -> None:
    """Requests at each rate (what one engine ends is 1) for so many seconds, whatever becomes of them."""
    async with asyncio.TaskGroup() as group:
        for rate, seconds in rates:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                group.create_task(ask(session, url, seen))
                await asyncio.sleep(1 / (rate * CAPACITY))


async def watch(session: aiohttp.ClientSession, url: str, seen: Seen, step_at: float) -> None:
    """Note every change of the number of engines that are there."""
    while True:
        async with session.get(f"{url}/state") as answer:
            replicas = (await answer.json())["models"][0]["replicas"]
        if not seen.changes or seen.changes[-1].replicas != replicas:
            seen.changes.append(Change(round(time.monotonic() - step_at, 1), replicas))
            print(json.dumps(seen.changes[-1]._asdict()), flush=True)
        await asyncio.sleep(0.2)


async def measure(url: str, *, before_s: float, high_s: float, after_s: float, low: float, high: float) -> Seen:
    """A load of `low`, from second 0 on of `high` for `high_s`, and of `low` again until the number is one again, for
    `after_s` at most."""
    seen = Seen()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        watching = asyncio.create_task(watch(session, url, seen, time.monotonic() + before_s))
        await send(session, url, seen, [(low, before_s), (high, high_s)])
        until = time.monotonic() + after_s
        while time.monotonic() < until and not (len(seen.changes) > 1 and seen.changes[-1].replicas == 1):
            await send(session, url, seen, [(low, 5)])
        # What has turned once must not turn again.
        await send(session, url, seen, [(low, before_s)])
        watching.cancel()
    return seen


def autoscaling_of(file: str) -> dict[str, Any]:
    for application in yaml.safe_load(Path(file).read_text())["applications"]:
        for deployment in application.get("deployments", []):
            if deployment["name"] == "ModelReplica" and "autoscaling_config" in deployment:
                found: dict[str, Any] = deployment["autoscaling_config"]
                return found
    raise ValueError(f"{file} has no autoscaling_config of a ModelReplica")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", help="a Serve config file, whose autoscaling_config counts")
    parser.add_argument("--max-replicas", type=int)
    parser.add_argument("--seconds", type=float, default=60, help="of the high load")
    parser.add_argument("--low", type=float, default=0.3, help="in what one replica can do")
    parser.add_argument("--high", type=float, default=1.6)
    args = parser.parse_args()
    autoscaling = dict(AS_DOCUMENTED if args.file is None else autoscaling_of(args.file))
    if args.max_replicas is not None:
        autoscaling["max_replicas"] = args.max_replicas
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "step.yaml")
        file.write_text(yaml.safe_dump(config(port, autoscaling)))
        os.environ.setdefault("PYTHONPATH", os.getcwd())
        with running(str(file)) as (process, lines):
            wait_for_line(process, lines, "http://")
            times = {"before_s": 20.0, "high_s": args.seconds, "after_s": 400.0}
            seen = asyncio.run(measure(f"http://127.0.0.1:{port}", **times, low=args.low, high=args.high))
    said = {
        "changes": [list(change) for change in seen.changes],
        "reversals": seen.reversals,
        "whole": seen.whole,
        "lost": len(seen.wrong),
        "first_lost": seen.wrong[:2],
        "longest_wait_s": round(seen.longest_wait_s, 1),
        "by_engine": sorted(seen.by_engine.values(), reverse=True),
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
