"""Half an hour of streams while engines and replicas are killed, stopped and scaled, and clients leave.

    python -m tests.serving.soak --minutes 30 --seed 1
    python -m tests.serving.soak --minutes 10 --faults update,scale

Engines without a model, whose every token says its position: each stream is compared with what it must be. Prints a
JSON line a minute, and one at the end: what was lost, the longest gap in a stream, and what was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
import warnings
from typing import Any, NamedTuple

import psutil

from tests.support.paced_cluster import redeploy
from tests.support.paced_config import paced_config
from tests.support.ports import free_port
from tests.support.streams_under_load import Client, Seen, open_session
from tests.support.titled import titled

ROWS = 32
REPLICAS = 3
COST = "10:20:100:0"
STREAMS = 24


class Place(NamedTuple):
    """Where the server is, and whose tokenizer it has."""

    port: int
    model: str


def config(place: Place, replicas: int, edition: int = 0) -> dict[str, Any]:
    engine = {
        "model": {"path": place.model, "name": "m", "max_model_len": 4096},
        "scheduler": {"max_num_seqs": ROWS, "max_num_batched_tokens": 2048, "max_queued_requests": 1000 + edition},
    }
    model = {"engine": engine, "cost": COST, "start_s": 1.0, "drain_timeout_s": 3.0}
    # Engines die of the soak here, never of a request, and one stream may see many of them go.
    face = {"routing": {"max_engine_deaths": 50}}
    return paced_config(place.port, ingresses=2, engines=replicas, model=model, face=face)


FAULTS = ("kill engine", "kill replica", "stop engine", "scale", "update")


async def trouble(seen: Seen, place: Place, until: float, rng: random.Random, faults: list[str]) -> None:
    """A fault every few seconds, whatever the last one left; updates and changes of number are waited for."""
    replicas, edition = REPLICAS, 0
    while time.monotonic() < until - 20:
        await asyncio.sleep(rng.uniform(4, 10))
        fault = rng.choice(faults)
        if fault == "scale":
            replicas = rng.choice([number for number in range(1, REPLICAS + 2) if number != replicas])
            await asyncio.to_thread(redeploy, config(place, replicas, edition))
        elif fault == "update":
            # All replicas are replaced, one after the other.
            edition += 1
            await asyncio.to_thread(redeploy, config(place, replicas, edition))
        else:
            name = "PacedEngine" if "engine" in fault else "ModelReplica"
            found = [each for each in titled(name) if _runs(each)]
            if not found:
                continue
            rng.choice(found).send_signal(signal.SIGSTOP if "stop" in fault else signal.SIGKILL)
        seen.faults[fault] += 1


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _mib(title: str) -> int:
    return round(sum(process.memory_info().rss for process in titled(title) if _runs(process)) / 2**20)


async def measure(place: Place, minutes: float, seed: int, faults: list[str]) -> Seen:
    url, seen = f"http://127.0.0.1:{place.port}", Seen()
    until = time.monotonic() + 60 * minutes
    async with open_session() as session:
        clients = [Client(session, url, seen, random.Random(seed * 1000 + number)) for number in range(STREAMS)]
        reporting = asyncio.create_task(_report(seen))
        troubling = trouble(seen, place, until, random.Random(seed), faults)
        await asyncio.gather(troubling, *(client.run(until) for client in clients))
        reporting.cancel()
        await asyncio.sleep(20)
        async with session.get(f"{url}/state") as answer:
            print(json.dumps({"state_at_the_end": await answer.json()}), flush=True)
    return seen


async def _report(seen: Seen) -> None:
    while True:
        print(json.dumps(_line(seen)), flush=True)
        await asyncio.sleep(60)


def _line(seen: Seen) -> dict[str, Any]:
    return {
        "whole": seen.whole,
        "aborted": seen.aborted,
        "refused": seen.refused,
        "wrong": len(seen.wrong),
        "kinds_of_wrong": sorted({wrong[:200] for wrong in seen.wrong})[:4],
        "longest_gap_s": round(seen.longest_gap_s, 1),
        "faults": dict(seen.faults),
        "ingress_mib": _mib("OpenAIIngress"),
        "engine_mib": _mib("PacedEngine"),
        "processes": len(psutil.Process().children(recursive=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--faults", type=lambda text: text.split(","), default=list(FAULTS))
    args = parser.parse_args()
    place = Place(free_port(), args.model)
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        from tests.support.deployed import deploy

        ray.init("local", num_cpus=16, include_dashboard=False, namespace="serve", _node_ip_address="127.0.0.1")
        deploy(config(place, REPLICAS))
        seen = asyncio.run(measure(place, args.minutes, args.seed, args.faults))
        print(json.dumps(_line(seen)), flush=True)
        ray.shutdown()
    sys.exit(1 if seen.wrong else 0)


if __name__ == "__main__":
    main()
