"""The placement group of one engine: pure arithmetic, used by the executor and by the Serve replica alike.

Bundle 0 holds the processes without a device (the replica and the engine actor), bundle 1 + i worker i.
"""

from __future__ import annotations

from raylm.config.engine import EngineConfig

STRATEGY = "STRICT_PACK"
"""Engine and workers share a node: plans reach the workers through a Unix socket."""

REPLICA_CPUS = 0.1
ENGINE_CPUS = 0.1
CPU_WORKER_CPUS = 0.5
GPU_WORKER_CPUS = 0.5

Bundle = dict[str, float]


def worker_resources(config: EngineConfig, *, cluster_has_gpu: bool) -> Bundle:
    """What Ray sets aside for one worker. `auto` takes a GPU where the cluster has any."""
    device = config.runtime.device
    if device == "cuda" or (device == "auto" and cluster_has_gpu):
        return {"CPU": GPU_WORKER_CPUS, "GPU": 1.0}
    return {"CPU": CPU_WORKER_CPUS}


def engine_bundles(worker: Bundle, *, num_workers: int = 1) -> list[Bundle]:
    """Bundles of one model replica, its engine and its workers."""
    return [{"CPU": REPLICA_CPUS + ENGINE_CPUS}, *([dict(worker)] * num_workers)]


def worker_bundle_index(worker_index: int) -> int:
    return 1 + worker_index
