"""What the Ray cluster has, and room in it for one engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.executor.placement import (
    Bundle,
    NodeResources,
    Strategy,
    bundle_labels,
    choose_strategy,
    describe_shortage,
    engine_bundles,
    worker_resources,
)

_POLL_S = 0.5


def cluster_nodes() -> list[NodeResources]:
    """The nodes that live."""
    return [
        NodeResources(
            node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0), dict(node.get("Labels") or {})
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def plan_bundles(config: EngineConfig) -> tuple[Bundle, list[Bundle]]:
    """What Ray sets aside for one worker, and all bundles of one engine."""
    worker = worker_resources(config, cluster_has_gpu=any(node.gpus for node in cluster_nodes()))
    return worker, engine_bundles(worker, num_workers=config.parallel.num_workers)


def wait_for_room(config: EngineConfig, bundles: Sequence[Bundle]) -> Strategy:
    """How to spread the bundles over the cluster. Where no node is large enough the autoscaler is asked for them, if
    there is one. Raises ConfigError with the cluster's resources after parallel.placement_timeout_s."""
    deadline = time.monotonic() + config.parallel.placement_timeout_s
    asked = False
    try:
        while True:
            try:
                return choose_strategy(config, bundles, cluster_nodes())
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
            if not asked:
                request_resources(bundles=[dict(bundle) for bundle in bundles])
                asked = True
            time.sleep(_POLL_S)
    finally:
        if asked:
            request_resources(bundles=[])


def reserve(config: EngineConfig, *, name: str = "") -> tuple[PlacementGroup, Bundle]:
    """A placement group for one engine, ready to use; `name` is for finding it again.

    Raises ConfigError when it cannot be had in time.
    """
    worker, bundles = plan_bundles(config)
    strategy = wait_for_room(config, bundles)
    labels = bundle_labels(config, bundles)
    group = placement_group(bundles, strategy=strategy, name=name, bundle_label_selector=labels)
    timeout = config.parallel.placement_timeout_s
    if not group.wait(timeout):
        remove_placement_group(group)
        free = ray.available_resources()
        raise ConfigError(
            f"{describe_shortage(config, bundles, cluster_nodes())}; after parallel.placement_timeout_s {timeout:g} s "
            f"there were free: {free.get('GPU', 0):g} GPU, {free.get('CPU', 0):g} CPU"
        )
    return group, worker
