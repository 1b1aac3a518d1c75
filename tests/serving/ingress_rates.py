"""How many requests and tokens a second go through one to eight ingresses, where engines cost nothing.

    python -m tests.serving.ingress_rates --ingresses 1,2 --clients 2

Prints a JSON line for each number of ingresses and kind of request: `short`, 16 tokens in and one out; `stream`, 128
tokens out, each in a chunk of its own where the ingress keeps up. The clients are processes of `raylm bench serve`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tests.support.paced_config import paced_config
from tests.support.ports import free_port
from tests.support.serve_process import running, wait_for_line

CASES = {"short": "short:{requests}:16:1", "stream": "stream:{requests}:16:128"}
SHARES = {"short": 8, "stream": 1}


def config(port: int, ingresses: int, engines: int, model: str) -> dict[str, object]:
    engine = {
        "model": {"path": model, "name": "m", "max_model_len": 2048},
        "scheduler": {"max_num_seqs": 512, "max_num_batched_tokens": 16384, "max_queued_requests": 100_000},
        "cache": {"prefix_caching": False},
    }
    return paced_config(port, ingresses=ingresses, engines=engines, model={"engine": engine, "num_blocks": 65_536})


def measure(url: str, kind: str, clients: int, requests: int, at_once: int) -> dict[str, float]:
    """Requests and tokens a second of all clients together."""
    case = CASES[kind].format(requests=requests * SHARES[kind])
    command = [sys.executable, "-m", "raylm.cli", "bench", "serve", "--url", url, "--vocab-size", "40000"]
    command += ["--case", case, "--concurrency", str(at_once)]
    processes = [
        subprocess.Popen([*command, "--seed", str(number)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for number in range(clients)
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    assert not any(each["failed"] for each in found), found
    return {
        "requests_per_s": round(sum(each["requests"] / each["seconds"] for each in found), 1),
        "tokens_per_s": round(sum(each["output_tokens_per_s"] for each in found)),
        "ttft_ms_p50": round(max(each["ttft_ms_p50"] for each in found), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ingresses", default="1,2")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    args = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    for ingresses in map(int, args.ingresses.split(",")):
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rates.yaml")
            file.write_text(yaml.safe_dump(config(port, ingresses, args.engines, args.model)))
            with running(str(file)) as (process, lines):
                wait_for_line(process, lines, "http://")
                url = f"http://127.0.0.1:{port}/v1"
                measure(url, "short", 1, 50, args.at_once)
                for kind in CASES:
                    rates = measure(url, kind, args.clients, args.requests, args.at_once)
                    print(json.dumps({"ingresses": ingresses, "kind": kind} | rates), flush=True)


if __name__ == "__main__":
    main()
