"""Ray's GCS is killed while streams run, and comes back with what it kept: python -m tests.helm.head_restart SECONDS

Where it keeps it says the environment, as KubeRay sets it for `gcsFaultToleranceOptions`. Prints one line of JSON: what
clients of streams got, and a request while there was no GCS and one after it was back.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import httpx
import ray
from ray.cluster_utils import Cluster

from tests.support.deployed import deploy
from tests.support.ports import free_port

LIMIT_S = 120.0
STREAMS = 8
TOKENS = 400
MODEL = "smollm2-135m"
ENGINE = {"model": {"path": MODEL, "max_model_len": 1024}, "runtime": {"device": "cpu"}}


def main() -> None:
    options = {"host": "127.0.0.1", "port": free_port()}
    # 50 ms a step: a stream takes 20 s, the outage lies inside.
    model = {"engine": ENGINE, "cost": "50:0:0:0", "num_blocks": 4096, "start_s": 0.0}
    config = {
        "proxy_location": "HeadOnly",
        "http_options": options,
        "applications": [
            {"name": "llm", "route_prefix": "/", "import_path": "raylm.serving.app:build_ingress", "args": {}},
            {"name": "model", "route_prefix": None, "import_path": "tests.support.paced:build_paced", "args": model},
        ],
    }
    with httpx.Client(base_url=f"http://127.0.0.1:{options['port']}", timeout=LIMIT_S) as client:
        head = {"num_cpus": 0, "include_dashboard": False, "gcs_server_port": free_port()}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=3)
            ray.init(cluster.address, namespace="serve", log_to_driver=False)
            deploy(config)
            print(json.dumps(outage(client, cluster, float(sys.argv[1]))), flush=True)
        finally:
            ray.shutdown()
            cluster.shutdown()


def outage(client: httpx.Client, cluster: Cluster, seconds: float) -> dict[str, object]:
    streams: list[tuple[str, float]] = []
    begun = threading.Semaphore(0)
    readers = [
        threading.Thread(target=lambda: streams.append(read_stream(client, begun)), daemon=True) for _ in range(STREAMS)
    ]
    for reader in readers:
        reader.start()
    for _ in readers:
        begun.acquire(timeout=LIMIT_S)
    node = cluster.head_node
    node.kill_gcs_server()
    died = time.monotonic()
    during = ask(client)
    time.sleep(max(0.0, seconds - (time.monotonic() - died)))
    node.start_gcs_server()
    for reader in readers:
        reader.join(LIMIT_S)
    return {
        "reasons": [reason for reason, _ in streams],
        "longest_gap_s": round(max(gap for _, gap in streams), 2),
        "during": during,
        "after": ask(client),
        "actors": sorted(actors()),
    }


def actors() -> list[str]:
    """The names of what lives and Ray must find again: the Directory and Serve's controller among them."""
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


def ask(client: httpx.Client) -> int | str:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
    try:
        return client.post("/v1/completions", json=body).status_code
    except httpx.HTTPError as error:
        return repr(error)


def read_stream(client: httpx.Client, begun: threading.Semaphore) -> tuple[str, float]:
    """The finish reason of a long completion, or what went wrong with it; and its longest silence."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    last, heard, longest = "nothing", time.monotonic(), 0.0
    try:
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if last == "nothing":
                        begun.release()
                    else:
                        longest = max(longest, now - heard)
                    last, heard = line, now
        return json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"], longest
    except (httpx.HTTPError, LookupError, ValueError) as error:
        begun.release()
        return repr(error), longest


if __name__ == "__main__":
    main()
