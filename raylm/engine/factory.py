"""From a configuration to an engine: the only place that chooses between executors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylm.config.engine import EngineConfig
from raylm.engine.engine import Engine

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from raylm.executor.placement import Bundle


def local_engine(config: EngineConfig, *, progress: bool = True) -> Engine:
    """An engine in this process. On a CPU scheduling has nothing to hide behind, so one plan is in flight; on a GPU the
    next plan is made while the last one runs."""
    from raylm.executor.local import LocalExecutor

    executor = LocalExecutor(config, progress=progress)
    window = config.runtime.plans_in_flight or (2 if executor.overlaps else 1)
    return Engine(config, executor, plans_in_flight=window)


def ray_engine(config: EngineConfig, *, group: PlacementGroup, resources: Bundle) -> Engine:
    """An engine whose workers are Ray actors in `group`; the next plan is made while the last one runs."""
    from raylm.executor.ray import RayExecutor

    window = config.runtime.plans_in_flight or 2
    return Engine(config, RayExecutor(config, group=group, resources=resources), plans_in_flight=window)
