"""What the Ray cluster has, and room in it for one engine."""

from __future__ import annotations

import time

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raylm.config.engine import EngineConfig
from raylm.errors import ConfigError
from raylm.executor.placement import (
    Bundle,
    NodeResources,
    Placement,
    choose_placement,
    describe_shortage,
    gpu_labels,
    stage_bundles,
    worker_resources,
)

_POLL_S = 0.5
_LEAST_WAIT_S = 5.0
"""What Ray may take to place bundles for which there is room."""


def cluster_nodes() -> list[NodeResources]:
    """The nodes that live."""
    return [
        NodeResources(
            node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0), dict(node.get("Labels") or {})
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def plan_worker(config: EngineConfig) -> Bundle:
    """What Ray sets aside for one worker."""
    return worker_resources(config, cluster_has_gpu=any(node.gpus for node in cluster_nodes()))


def wait_for_room(config: EngineConfig, worker: Bundle) -> Placement:
    """How to spread the engine over the cluster. Where its nodes are too small or too few the autoscaler is asked for
    others, if there is one. Raises ConfigError with the cluster's resources after parallel.placement_timeout_s."""
    deadline = time.monotonic() + config.parallel.placement_timeout_s
    asked = False
    try:
        while True:
            try:
                return choose_placement(config, worker, cluster_nodes())
            except ConfigError as error:
                if time.monotonic() > deadline:
                    waited = f"after parallel.placement_timeout_s {config.parallel.placement_timeout_s:g} s"
                    raise ConfigError(f"{error}, {waited}") from None
            if not asked:
                bundles = stage_bundles(config, worker)
                labels = gpu_labels(config.parallel.gpu_type, bundles)
                request_resources(bundles=bundles, bundle_label_selectors=labels)
                asked = True
            time.sleep(_POLL_S)
    finally:
        if asked:
            request_resources(bundles=[])


def reserve(config: EngineConfig, *, name: str = "") -> tuple[PlacementGroup, Bundle]:
    """A placement group for one engine, ready to use, and what it has for each worker; `name` is for finding it again.

    Raises ConfigError when it cannot be had in time.
    """
    worker = plan_worker(config)
    timeout = config.parallel.placement_timeout_s
    deadline = time.monotonic() + timeout
    bundles, strategy, labels = wait_for_room(config, worker)
    group = placement_group(bundles, strategy=strategy, name=name, bundle_label_selector=labels)
    if not group.wait(max(deadline - time.monotonic(), _LEAST_WAIT_S)):
        free = ray.available_resources()
        remove_placement_group(group)
        raise ConfigError(
            f"{describe_shortage(config, worker, cluster_nodes())}; others use them: after "
            f"parallel.placement_timeout_s {timeout:g} s {free.get('GPU', 0):g} GPU and {free.get('CPU', 0):g} CPU "
            "were free in all"
        )
    return group, worker
