"""A node of a small Ray cluster is drained while it streams: python -m tests.helm.two_nodes SERVE_CONFIG DRAIN_COMMAND

Prints one line of JSON: what the client of the stream got, and whether the node has ended by itself.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import ray
import yaml
from ray.cluster_utils import Cluster

from tests.support.deployed import deploy

LIMIT_S = 150.0
TOKENS = 200


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    options = config["http_options"]
    with httpx.Client(base_url=f"http://{options['host']}:{options['port']}", timeout=LIMIT_S) as client:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            leaving = cluster.add_node(num_cpus=1)
            ray.init(cluster.address, namespace="serve", log_to_driver=False)
            deploy(config)
            cluster.add_node(num_cpus=1)
            outcome = drain_while_streaming(client, sys.argv[2], leaving.node_id)
            print(json.dumps(outcome), flush=True)
        finally:
            ray.shutdown()
            cluster.shutdown()


def drain_while_streaming(client: httpx.Client, command: str, node_id: str) -> dict[str, object]:
    """Drain the node once the stream has begun; wait until it is gone and the stream has ended."""
    gcs = ray.get_runtime_context().gcs_address
    words = [*shlex.split(command), "--address", gcs, "--node-id", node_id]
    reasons: list[str] = []
    begun = threading.Event()
    reader = threading.Thread(target=lambda: reasons.extend(read_stream(client, begun)))
    reader.start()
    begun.wait(LIMIT_S)
    drained = subprocess.run(words, capture_output=True, text=True)
    gone = wait_until_gone(node_id)
    reader.join(LIMIT_S)
    body = {"model": "smollm2-135m", "prompt": "Hello", "max_tokens": 2}
    after = client.post("/v1/completions", json=body).status_code
    return {"drain": drained.returncode, "said": drained.stderr, "gone": gone, "reasons": reasons, "after": after}


def read_stream(client: httpx.Client, begun: threading.Event) -> list[str]:
    """The finish reason of a long completion, or what went wrong with it."""
    body = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    try:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line for line in begin(response, begun) if line.startswith("data: {")]
    except httpx.HTTPError as error:
        return [repr(error)]
    finally:
        begun.set()
    return [json.loads(lines[-1].removeprefix("data: "))["choices"][0]["finish_reason"]]


def begin(response: httpx.Response, begun: threading.Event):
    for line in response.iter_lines():
        begun.set()
        yield line


def wait_until_gone(node_id: str) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if node_id not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    main()
