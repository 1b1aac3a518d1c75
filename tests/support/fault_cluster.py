"""A cluster of a head and two nodes on this machine with a served model, as a process of its own: for tests that kill
parts of it. `python -m tests.support.fault_cluster SERVE_CONFIG PORT` runs until its standard input ends."""

from __future__ import annotations

import select
import sys
import threading
import time
from typing import Any

import psutil


def main(config: str, port: int) -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import placement_group

    from raylm.executor.local_head import local_heads
    from raylm.log import Laps
    from raylm.serving.program.deploy import deploy
    from raylm.serving.program.serve_file import serve_config

    node = {"node_ip_address": "127.0.0.1", "object_store_memory": 80_000_000, "include_dashboard": False}
    # As in `raylm serve`, nodes have nothing of Ray's dashboard, whose processes take longer to start than the others.
    with local_heads(lambda: None):
        # The head has no room for an engine, each of the others for one.
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 1})
        for _ in range(2):
            cluster.add_node(**node, num_cpus=2, wait=False)
        cluster.wait_for_nodes()
    ray.init(cluster.address, namespace="serve", log_to_driver=False)
    # The ingress goes to the head, so that it outlives every node that an engine is on.
    everything = placement_group([{"CPU": 2}] * 2, strategy="STRICT_SPREAD")
    assert everything.wait(180)
    threading.Thread(target=_make_room, args=(everything,), daemon=True).start()
    served = serve_config(config, host="127.0.0.1", port=port)
    # Requests end with their engine here, which shows when a fault is found; elsewhere they go on.
    served["applications"][0].setdefault("args", {})["routing"] = {"failover_wait_s": 0}
    deploy(served, Laps())
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        # Ray's processes take a dead raylet for alive while it is a zombie.
        for each in cluster.list_all_nodes():
            each.live_processes()
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def _make_room(group: Any) -> None:
    """Give back what `group` holds once the ingress runs."""
    from ray.util.placement_group import remove_placement_group

    while not any("OpenAIIngress" in _title(child) for child in psutil.Process().children(recursive=True)):
        time.sleep(0.1)
    remove_placement_group(group)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
