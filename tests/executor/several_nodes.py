"""Engines over a Ray cluster of several nodes, each with an address of its own:

    python -m tests.executor.several_nodes FOLDER

This process and its engines are on the first node, the workers on the others, so every plan travels over TCP. Prints
one line of JSON: of each case the tokens and the addresses of plans, of the first the nodes of the bundles.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from raylm import LLM, EngineConfig, SamplingParams
from raylm.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[3 + i, 5, 7, 9 + i] * (2 + i) for i in range(6)]
NODES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


@ray.remote(num_cpus=0.8)
class Taken:
    """Holds what it was started with."""


def main(folder: str, addresses: list[str]) -> None:
    with cluster(addresses):
        whole = load(folder, 2, 2)
        found: dict[str, object] = {"prompts": PROMPTS, "stages apart": {**outcome(whole), "bundles": placed()[0]}}
        try:
            load(folder, 1, 1)
        except ConfigError as error:
            found["taken"] = str(error)
        whole.close()
        engines = [load(folder, 1, 2), load(folder, 1, 1)]
        found["two at once"] = [outcome(engine) for engine in engines]
        for engine in engines:
            engine.close()
        found["left"] = placed()
        print(json.dumps(found), flush=True)


@contextmanager
def cluster(addresses: list[str]) -> Iterator[None]:
    """Nodes of one CPU: room for a stage of two, or for an engine and a worker. On the first only for an engine."""
    nodes = Cluster()
    try:
        for address in addresses:
            nodes.add_node(wait=False, num_cpus=1, node_ip_address=address, include_dashboard=False)
        nodes.wait_for_nodes()
        ray.init(nodes.address, log_to_driver=False)
        taken = Taken.options(resources={f"node:{addresses[0]}": 0.01}).remote()
        ray.get(taken.__ray_ready__.remote())
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def load(folder: str, tensor: int, pipeline: int) -> LLM:
    config = {
        "model": {"path": folder, "max_model_len": 64},
        "cache": {"block_size": 4, "num_blocks": 200},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
        "runtime": {"device": "cpu", "num_threads": 1, "ray_workers": True},
        "parallel": {"tensor": tensor, "pipeline": pipeline, "placement_timeout_s": 5},
    }
    return LLM(EngineConfig.model_validate(config), progress=False)


def outcome(llm: LLM) -> dict[str, object]:
    addresses = llm._engine._executor._channel.addresses
    return {
        "tokens": [completion.outputs[0].token_ids for completion in llm.generate(PROMPTS, GREEDY, progress=False)],
        "plans": [plan.address for plan in addresses if plan.server_key],
    }


def placed() -> list[list[str]]:
    """For each placement group the addresses of the nodes that have its bundles."""
    address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    return [[address_of[node] for _, node in sorted(group["bundles_to_node_id"].items())] for group in groups]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or NODES)
