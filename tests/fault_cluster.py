"""A cluster of a head and two nodes on this machine with a served model, as a process of its own: for tests that kill
parts of it. `python fault_cluster.py SERVE_CONFIG PORT` runs until its standard input ends."""

from __future__ import annotations

import sys


def main(config: str, port: int) -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from raylm.serving.run import deploy, serve_config

    node = {"node_ip_address": "127.0.0.1", "object_store_memory": 80_000_000, "include_dashboard": False}
    # The head has no room for an engine, each of the others for one.
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 1})
    for _ in range(2):
        cluster.add_node(**node, num_cpus=2)
    ray.init(cluster.address, namespace="serve", log_to_driver=False)
    deploy(serve_config(config, host="127.0.0.1", port=port))
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
