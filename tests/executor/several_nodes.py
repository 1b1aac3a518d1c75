"""Engines over a Ray cluster of several nodes, each with an address of its own: python several_nodes.py MODEL_FOLDER

The driver's engine is on a node that holds no workers. Prints one line of JSON: for each case the tokens, the nodes of
the ranks and how their plans came.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

from raylm import LLM, EngineConfig, SamplingParams
from raylm.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[3 + i, 5, 7, 9 + i] * (2 + i) for i in range(6)]
ENGINE_NODE, WORKER_NODES = "127.0.0.1", ("127.0.0.2", "127.0.0.3")


def main(folder: str) -> None:
    with cluster():
        found: dict[str, object] = {}
        # No node holds three workers' CPUs: one stage on each. Tensor ranks of a stage stay together.
        first, second = load(folder, 1, 2), load(folder, 2, 2)
        found["stages"] = {"tokens": tokens(first), **workers(first)}
        found["groups"] = {"tokens": tokens(second), **workers(second)}
        found["first again"] = {"tokens": tokens(first), **workers(first)}
        try:
            load(folder, 2, 1)
        except ConfigError as error:
            found["taken"] = str(error)
        first.close()
        second.close()
        third = load(folder, 2, 1)
        found["one node"] = {"tokens": tokens(third), **workers(third)}
        third.close()
        print(json.dumps(found), flush=True)


@contextmanager
def cluster() -> Iterator[None]:
    options = {"num_cpus": 0.5, "include_dashboard": False, "node_ip_address": ENGINE_NODE}
    nodes = Cluster(initialize_head=True, head_node_args=options)
    try:
        for address in WORKER_NODES:
            nodes.add_node(num_cpus=1.5, node_ip_address=address, wait=False)
        nodes.wait_for_nodes()
        ray.init(nodes.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()
