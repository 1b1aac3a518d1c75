"""The placement group of one engine: pure arithmetic, used by the executor and by the Serve replica alike.

Bundle 0 holds the processes without a device (the replica and the engine actor), bundle 1 + i a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from raylm.config.engine import EngineConfig
from raylm.config.resolve import DeviceKind
from raylm.errors import ConfigError

REPLICA_CPUS = 0.1
ENGINE_CPUS = 0.1
CPU_WORKER_CPUS = 0.5
GPU_WORKER_CPUS = 0.5
GPU_TYPE_LABEL = "ray.io/accelerator-type"

Bundle = dict[str, float]
Strategy = Literal["STRICT_PACK", "PACK"]


class NodeResources(NamedTuple):
    """What one node of the cluster has in all."""

    cpus: float
    gpus: float
    labels: dict[str, str] = {}

    def holds(self, bundles: Sequence[Bundle]) -> bool:
        cpus = sum(bundle.get("CPU", 0) for bundle in bundles)
        return cpus <= self.cpus and sum(bundle.get("GPU", 0) for bundle in bundles) <= self.gpus


def worker_resources(config: EngineConfig, *, cluster_has_gpu: bool) -> Bundle:
    """What Ray sets aside for one worker. `auto` takes a GPU where the cluster has any."""
    device = config.runtime.device
    if device == "cuda" or (device == "auto" and cluster_has_gpu):
        return {"CPU": GPU_WORKER_CPUS, "GPU": 1.0}
    return {"CPU": CPU_WORKER_CPUS}


def worker_device(resources: Bundle) -> DeviceKind:
    """The device that Ray sets aside for one worker."""
    return "cuda" if resources.get("GPU") else "cpu"


def engine_bundles(worker: Bundle, *, num_workers: int = 1) -> list[Bundle]:
    """Bundles of one model replica, its engine and its workers."""
    return [{"CPU": REPLICA_CPUS + ENGINE_CPUS}, *([dict(worker)] * num_workers)]


def bundle_labels(config: EngineConfig, bundles: Sequence[Bundle]) -> list[dict[str, str]] | None:
    """The node labels that each bundle asks for; None where none asks for any."""
    wanted = config.parallel.gpu_type
    if wanted is None:
        return None
    return [{GPU_TYPE_LABEL: wanted} if bundle.get("GPU") else {} for bundle in bundles]


def worker_bundle_index(worker_index: int) -> int:
    return 1 + worker_index


def choose_strategy(config: EngineConfig, bundles: Sequence[Bundle], nodes: Sequence[NodeResources]) -> Strategy:
    """One node for all bundles where one is large enough, or where one may yet come; else as few nodes as can be.

    Tensor ranks talk after every layer, so a tensor group belongs on one node; stages talk once a step and may be
    apart. Raises ConfigError with what the nodes have when no node can hold a tensor group.
    """
    nodes = [node for node in nodes if _has_type(node, config.parallel.gpu_type)]
    if any(node.holds(bundles) for node in nodes):
        return "STRICT_PACK"
    group = bundles[1 : 1 + config.parallel.tensor]
    num_groups = sum(_num_groups(node, group) for node in nodes)
    everything = NodeResources(sum(node.cpus for node in nodes), sum(node.gpus for node in nodes))
    if num_groups < config.parallel.pipeline or not everything.holds(bundles):
        raise ConfigError(describe_shortage(config, bundles, nodes))
    return "PACK"


def describe_shortage(config: EngineConfig, bundles: Sequence[Bundle], nodes: Sequence[NodeResources]) -> str:
    """Why the bundles cannot be placed, with the numbers."""
    parallel = config.parallel
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundles[1].items())
    kind = f" with a GPU of type {parallel.gpu_type}" if parallel.gpu_type else ""
    found = "; ".join(f"{node.gpus:g} GPU, {node.cpus:g} CPU" for node in nodes) or "none"
    return (
        f"parallel.tensor {parallel.tensor} and parallel.pipeline {parallel.pipeline} need {parallel.num_workers} "
        f"workers of {each}, the {parallel.tensor} of a stage on one node{kind}; "
        f"the cluster's nodes{kind} have: {found}"
    )


def _num_groups(node: NodeResources, group: Sequence[Bundle]) -> int:
    count = 0
    while node.holds([*group] * (count + 1)):
        count += 1
    return count


def _has_type(node: NodeResources, gpu_type: str | None) -> bool:
    return gpu_type is None or node.labels.get(GPU_TYPE_LABEL) == gpu_type
