"""How many engines a cluster has room for, what each takes of it, and how one is opened."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import NamedTuple

from raylm.config.engine import EngineConfig
from raylm.config.resolve import resolve
from raylm.engine.engine import Engine
from raylm.engine.factory import local_engine, ray_engine
from raylm.errors import ConfigError
from raylm.executor.placement import ENGINE_CPUS, Bundle, NodeResources, worker_device, worker_resources


class Pool(NamedTuple):
    """`engines` engines of one configuration, each in an actor that takes `resources` and runs `rows` requests at a
    time."""

    engines: int
    resources: Bundle
    config: EngineConfig
    rows: int

    def full_batches(self, size: int) -> int:
        """Batches of `size` requests that keep an engine's rows full while the oldest of them comes to its end."""
        return 1 + max(1, -(-2 * self.rows // size))


def plan_pool(config: EngineConfig, engines: int | None, nodes: list[NodeResources]) -> Pool:
    """`engines`, or as many as the nodes have room for: one for each group of GPUs, or one a node without GPUs (more
    where runtime.num_threads leaves cores). Raises ConfigError when there is room for none."""
    worker = worker_resources(config, cluster_has_gpu=any(node.gpus for node in nodes))
    # A tensor group belongs on one node, the stages of a pipeline may be apart.
    room = sum(_tensor_groups(config, worker, node) for node in nodes) // config.parallel.pipeline
    if engines is None and not room:
        kind = "GPUs" if "GPU" in worker else "CPUs"
        raise ConfigError(
            f"the cluster's nodes do not have the {config.parallel.num_workers:g} {kind} of one engine; where the "
            "cluster grows by itself, say how many engines to wait for with --engines"
        )
    count = engines or room
    if "GPU" not in worker:
        config = _with_threads(config, count, [node for node in nodes if node.cpus >= 1])
    # The workers of several devices have a placement group of their own.
    resources = worker if config.in_one_process else {"CPU": ENGINE_CPUS}
    rows = resolve(config, worker_device(worker)).scheduler.max_num_seqs
    return Pool(count, resources, config, rows)


def _tensor_groups(config: EngineConfig, worker: Bundle, node: NodeResources) -> int:
    if "GPU" in worker:
        return int(node.gpus // (worker["GPU"] * config.parallel.tensor))
    cores = int(node.cpus)
    if config.runtime.num_threads is None:
        return min(cores, 1)
    return cores // (config.runtime.num_threads * config.parallel.tensor)


def _with_threads(config: EngineConfig, engines: int, nodes: list[NodeResources]) -> EngineConfig:
    """Share a node's cores where it gets several engines that were not told how many threads to use."""
    if config.runtime.num_threads is not None or engines <= len(nodes) or not nodes:
        return config
    each = -(-engines // len(nodes))
    threads = max(1, int(min(node.cpus for node in nodes)) // each)
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"num_threads": threads})})


def open_engine(config: EngineConfig) -> Engine:
    """The engine of the actor that this is called in."""
    # Nobody follows it: it would collect events for ever.
    quiet = config.model_copy(update={"cache": config.cache.model_copy(update={"events": False})})
    return local_engine(quiet, progress=False) if config.in_one_process else _engine_of_workers(quiet)


def _engine_of_workers(config: EngineConfig) -> Engine:
    """Ray ends a dead actor's workers, but keeps its placement group when the actor is started again. So the group has
    the actor's name, and the next life takes it back."""
    import ray
    from ray.util.placement_group import remove_placement_group

    from raylm.executor.cluster import reserve

    name = f"raylm-batch-{ray.get_runtime_context().get_actor_id()}"
    with suppress(ValueError):
        remove_placement_group(ray.util.get_placement_group(name))
    group, resources = reserve(config, name=name)
    return ray_engine(config, group=group, resources=resources, release=partial(remove_placement_group, group))
