"""Where an engine's processes go: pure arithmetic, used by the executor and by the Serve replica alike.

Bundle 0 of a placement group holds the processes without a device (the replica and the engine actor). Each of the
others holds one worker, or, of several stages, the tensor group of one: Ray never cuts a bundle in two, so the ranks of
a tensor group share a node wherever the stages go.
"""

from __future__ import annotations

from collections import Counter
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
_ENGINE: Bundle = {"CPU": REPLICA_CPUS + ENGINE_CPUS}
Strategy = Literal["STRICT_PACK", "PACK"]
_ROUNDING = 1e-6
"""Ray counts in ten thousandths; sums of tenths are off by less."""


class Placement(NamedTuple):
    """A placement group to ask Ray for."""

    bundles: list[Bundle]
    strategy: Strategy
    labels: list[dict[str, str]] | None
    """The node labels that each bundle asks for; None where none asks for any."""


class NodeResources(NamedTuple):
    """What one node of the cluster has in all."""

    cpus: float
    gpus: float
    labels: dict[str, str] = {}

    def room_for(self, bundle: Bundle) -> int:
        """How many such bundles fit at once."""
        has = {"CPU": self.cpus, "GPU": self.gpus}
        return min(int(has[name] / amount + _ROUNDING) for name, amount in bundle.items() if amount)

    def without(self, bundle: Bundle) -> NodeResources:
        return self._replace(cpus=self.cpus - bundle.get("CPU", 0), gpus=self.gpus - bundle.get("GPU", 0))

    def __str__(self) -> str:
        kind = f" ({self.labels[GPU_TYPE_LABEL]})" if GPU_TYPE_LABEL in self.labels else ""
        return f"{self.gpus:g} GPU{kind}, {self.cpus:g} CPU"


class WorkerPlace(NamedTuple):
    """Where Ray has put a worker."""

    node_id: str
    node_ip: str
    gpu_ids: list[str]
    pid: int


class WorkerSeat(NamedTuple):
    """A worker's number among those that share the model. As parallel.groups.Seat, in a process without torch."""

    rank: int
    node_ip: str
    meeting_point: str
    visible_gpus: list[str]
    gpu: int


def worker_resources(config: EngineConfig, *, cluster_has_gpu: bool) -> Bundle:
    """What Ray sets aside for one worker. `auto` takes a GPU where the cluster has any, or where one type is wanted."""
    device = config.runtime.device
    if device == "cuda" or (device == "auto" and (cluster_has_gpu or config.parallel.gpu_type is not None)):
        return {"CPU": GPU_WORKER_CPUS, "GPU": 1.0}
    return {"CPU": CPU_WORKER_CPUS}


def worker_device(resources: Bundle) -> DeviceKind:
    """The device that Ray sets aside for one worker."""
    return "cuda" if resources.get("GPU") else "cpu"


def worker_bundles(config: EngineConfig, worker: Bundle) -> list[Bundle]:
    """The engine's bundle and one for each worker."""
    return [dict(_ENGINE), *(dict(worker) for _ in range(config.parallel.num_workers))]


def stage_bundles(config: EngineConfig, worker: Bundle) -> list[Bundle]:
    """The engine's bundle and one for each stage, with room for its tensor group."""
    stage = {name: amount * config.parallel.tensor for name, amount in worker.items()}
    return [dict(_ENGINE), *(dict(stage) for _ in range(config.parallel.pipeline))]


def bundle_of_worker(index: int, *, num_workers: int, num_bundles: int) -> int:
    """The bundle that the index-th worker goes into."""
    return 1 + index // (num_workers // (num_bundles - 1))


def choose_placement(config: EngineConfig, worker: Bundle, nodes: Sequence[NodeResources]) -> Placement:
    """One node for the engine and a single stage where one is large enough; several stages on as few as have room now.

    Tensor ranks talk after every layer, so a tensor group belongs on one node; stages talk once a step and may be
    apart, which is better than to wait for a node that has room for all. Raises ConfigError with what the nodes have
    when they have too little, whoever uses it.
    """
    wanted = config.parallel.gpu_type
    fitting = [node for node in nodes if wanted is None or node.labels.get(GPU_TYPE_LABEL) == wanted]
    tensor, stages = config.parallel.tensor, config.parallel.pipeline
    if stages == 1 and any(node.without(_ENGINE).room_for(worker) >= tensor for node in fitting):
        bundles = worker_bundles(config, worker)
        return Placement(bundles, "STRICT_PACK", gpu_labels(wanted, bundles))
    bundles = stage_bundles(config, worker)
    room = sum(node.room_for(bundles[1]) for node in fitting)
    # The engine needs no GPU, but it may have to go where a stage would.
    in_the_way = min((_cost_of_engine(node, bundles[1], node in fitting) for node in _with_room(nodes)), default=room)
    if room - in_the_way < stages:
        raise ConfigError(describe_shortage(config, worker, nodes))
    return Placement(bundles, "PACK", gpu_labels(wanted, bundles))


def describe_shortage(config: EngineConfig, worker: Bundle, nodes: Sequence[NodeResources]) -> str:
    """Why there is no room for the workers, with the numbers."""
    parallel = config.parallel
    each = ", ".join(f"{amount:g} {name}" for name, amount in worker.items())
    kind = f" of type {parallel.gpu_type}" if parallel.gpu_type else ""
    together = f", the {parallel.tensor} of a stage on one node" if parallel.tensor > 1 else ""
    counts = Counter(map(str, nodes))
    found = "; ".join(node if count == 1 else f"{count} × {node}" for node, count in counts.items()) or "none"
    workers = f"{parallel.num_workers} workers" if parallel.num_workers > 1 else "a worker"
    return (
        f"parallel.tensor {parallel.tensor} and parallel.pipeline {parallel.pipeline} need {workers} of "
        f"{each}{kind}{together}, and {_ENGINE['CPU']:g} CPU for the engine; the cluster's nodes have: {found}"
    )


def rank_order(places: Sequence[WorkerPlace], engine_node: str) -> list[int]:
    """The workers' indices in the order of their ranks: by node, the engine's first, then by GPU. So the ranks of a
    tensor group are neighbours on one node."""

    def key(index: int) -> tuple[bool, str, list[int], int]:
        place = places[index]
        return (
            place.node_id != engine_node,
            place.node_id,
            [int(gpu) for gpu in place.gpu_ids if gpu.isdecimal()],
            index,
        )

    return sorted(range(len(places)), key=key)


def seat_of(rank: int, places: Sequence[WorkerPlace], meeting_point: str) -> WorkerSeat:
    """The seat of one rank; `places` are in the order of ranks."""
    own = places[rank]
    visible = [gpu for place in places if place.node_id == own.node_id for gpu in place.gpu_ids]
    gpu = visible.index(own.gpu_ids[0]) if own.gpu_ids else 0
    return WorkerSeat(rank, own.node_ip, meeting_point, visible, gpu)


def gpu_labels(gpu_type: str | None, bundles: Sequence[Bundle]) -> list[dict[str, str]] | None:
    """The node labels that each bundle asks for; None where none asks for any."""
    if gpu_type is None:
        return None
    return [{GPU_TYPE_LABEL: gpu_type} if bundle.get("GPU") else {} for bundle in bundles]


def _with_room(nodes: Sequence[NodeResources]) -> list[NodeResources]:
    return [node for node in nodes if node.room_for(_ENGINE)]


def _cost_of_engine(node: NodeResources, stage: Bundle, holds_stages: bool) -> int:
    """Stages that have to go elsewhere when the engine is on this node."""
    return node.room_for(stage) - node.without(_ENGINE).room_for(stage) if holds_stages else 0
