"""Ten times what the engines can do: who is served, how fast the others are refused, and what is left afterwards.

    python -m tests.serving.overload --seconds 60 --times 10

Engines without a model, so that the engines and not the cores are what is scarce. First the best there is: as many
requests at once as the engines have rows. Then requests at `--times` that rate, whatever becomes of them; then one
request after the other until one has its first token in time. Prints a JSON line for each part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import yaml

from tests.support.paced_config import paced_config
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

PROMPT, OUTPUT = 32, 40
ROWS = 16
MAX_QUEUE_S = 2.0
GOOD_TTFT_S = 2 * MAX_QUEUE_S
COST = "20:50:200:0"
"""A step of 20 ms: an engine of 16 rows ends some 20 requests of 40 tokens a second."""


@dataclass
class Seen:
    """What became of the requests of one part."""

    ttft: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    without_retry: int = 0

    def line(self, part: str, seconds: float, **more: object) -> str:
        good = sum(ttft <= GOOD_TTFT_S for ttft in self.ttft)
        said = {
            "part": part,
            "seconds": round(seconds, 1),
            "served_per_s": round(len(self.ttft) / seconds, 1),
            "good_per_s": round(good / seconds, 1),
            "ttft_s": _spread(self.ttft),
            "refused": len(self.refused),
            "refused_ms": _spread([1000 * each for each in self.refused]),
            "refused_without_retry_after": self.without_retry,
            "failed": len(self.failed),
            "first_failure": self.failed[0] if self.failed else None,
        }
        return json.dumps(said | more)


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3) for name, share in places.items()}


def config(port: int, replicas: int, ingresses: int, model: str) -> dict[str, object]:
    engine = {
        "model": {"path": model, "name": "m", "max_model_len": 2048},
        "scheduler": {"max_num_seqs": ROWS, "max_num_batched_tokens": 2048, "max_queue_s": MAX_QUEUE_S},
    }
    return paced_config(port, ingresses=ingresses, engines=replicas, model={"engine": engine, "cost": COST})


class Client:
    """Streams of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._count = 0

    async def ask(self, seen: Seen) -> bool:
        """One stream; whether it was served."""
        self._count += 1
        body = {
            "model": "m",
            # No two share a block.
            "prompt": [1 + (self._count * 7919 + place) % 40_000 for place in range(PROMPT)],
            "max_tokens": OUTPUT,
            "stream": True,
        }
        start = time.perf_counter()
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status in (429, 503):
                    await answer.read()
                    seen.refused.append(time.perf_counter() - start)
                    seen.without_retry += "retry-after" not in answer.headers
                    return False
                first = None
                last = b""
                async for line in answer.content:
                    if line.startswith(b"data:"):
                        first = first or time.perf_counter()
                        last = line
                if answer.status != 200 or last.strip() != b"data: [DONE]":
                    seen.failed.append(f"{answer.status}: {last[:200]!r}")
                    return False
                seen.ttft.append((first or time.perf_counter()) - start)
                return True
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.failed.append(f"{type(error).__name__}: {error}")
            return False


async def best(client: Client, at_once: int, seconds: float) -> tuple[Seen, float]:
    """As many streams at once as there are rows, one after the other."""
    seen, end = Seen(), time.perf_counter() + seconds

    async def one_after_the_other() -> None:
        while time.perf_counter() < end:
            await client.ask(seen)

    start = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return seen, time.perf_counter() - start


async def flood(client: Client, rate: float, seconds: float) -> tuple[Seen, float]:
    """So many streams a second, whatever becomes of them."""
    seen, start = Seen(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            if (wait := start + number / rate - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            group.create_task(client.ask(seen))
        sent = time.perf_counter() - start
    return seen, sent


async def recovery(client: Client) -> float:
    """Seconds until a request is served at once again."""
    start = time.perf_counter()
    while True:
        seen = Seen()
        if await client.ask(seen) and seen.ttft[0] < 0.5:
            return time.perf_counter() - start
        await asyncio.sleep(0.1)


def ingress_mib() -> float:
    """Memory of the ingresses, their own alone."""
    found = [each for each in psutil.Process().children(recursive=True) if "OpenAIIngress" in " ".join(each.cmdline())]
    return sum(each.memory_info().rss for each in found) / 2**20


async def measure(url: str, args: argparse.Namespace) -> None:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        client = Client(session, url)
        await best(client, ROWS * args.replicas, 5)
        seen, took = await best(client, ROWS * args.replicas, args.best_seconds)
        print(seen.line("best", took), flush=True)
        capacity, before = len(seen.ttft) / took, ingress_mib()
        seen, took = await flood(client, args.times * capacity, args.seconds)
        memory = {"ingress_mib_before": round(before), "ingress_mib_after": round(ingress_mib())}
        print(seen.line("flood", took, sent_per_s=round(args.times * capacity, 1), **memory), flush=True)
        print(json.dumps({"part": "recovery", "seconds": round(await recovery(client), 2)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--best-seconds", type=float, default=15)
    parser.add_argument("--times", type=float, default=10)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--ingresses", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    args = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "overload.yaml")
        file.write_text(yaml.safe_dump(config(port, args.replicas, args.ingresses, args.model)))
        os.environ.setdefault("PYTHONPATH", os.getcwd())
        with running(str(file)) as (process, lines):
            wait_for_line(process, lines, "http://")
            asyncio.run(measure(f"http://127.0.0.1:{port}", args))


if __name__ == "__main__":
    main()
