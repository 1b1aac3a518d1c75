"""From a configuration to an engine: the only place that chooses between executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from raylm.config.engine import EngineConfig
from raylm.config.resolve import resolve
from raylm.core.drafting import Drafter
from raylm.engine.engine import Engine
from raylm.executor.local_ray import connect_to_ray

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from raylm.executor.placement import Bundle
    from raylm.executor.ray import RayExecutor


def local_engine(config: EngineConfig, *, progress: bool = True, drafter: Drafter | None = None) -> Engine:
    """An engine in this process. On a CPU scheduling has nothing to hide behind, so one plan is in flight; on a GPU the
    next plan is made while the last one runs."""
    from raylm.executor.local import LocalExecutor, local_device

    resolved = resolve(config, local_device(config))
    executor = LocalExecutor(resolved, progress=progress)
    window = config.runtime.plans_in_flight or (2 if executor.overlaps else 1)
    return Engine(resolved, executor, plans_in_flight=window, drafter=drafter)


def ray_engine(
    config: EngineConfig, *, group: PlacementGroup, resources: Bundle, release: Callable[[], None] = lambda: None
) -> Engine:
    """An engine whose workers are Ray actors in `group`; the next plans are made while the last ones run. `release` is
    called when it has been shut down."""
    return engine_over(ray_executor(config, group=group, resources=resources, release=release))


def ray_executor(
    config: EngineConfig,
    *,
    group: PlacementGroup,
    resources: Bundle,
    release: Callable[[], None] = lambda: None,
    peers: Sequence[Any] = (),
) -> RayExecutor:
    """Workers in `group`, not started yet. `peers`: those of a live engine, by rank, to get the weights from."""
    from raylm.executor.placement import worker_device
    from raylm.executor.ray import RayExecutor

    resolved = resolve(config, worker_device(resources))
    return RayExecutor(resolved, group=group, resources=resources, release=release, peers=peers)


def engine_over(executor: RayExecutor) -> Engine:
    """The engine of these workers, which it starts."""
    config = executor.config
    window = config.runtime.plans_in_flight or config.parallel.pipeline + 1
    return Engine(config, executor, plans_in_flight=window)


def offline_engine(config: EngineConfig, *, progress: bool = True) -> Engine:
    """An engine for this process to drive: in it where one device is enough, else with Ray actors, in the cluster that
    this process is connected to or in one of its own. Raises ConfigError, EngineDeadError."""
    if config.in_one_process:
        return local_engine(config, progress=progress)
    is_ours = connect_to_ray()
    import ray
    from ray.util.placement_group import remove_placement_group

    from raylm.executor.cluster import reserve

    try:
        group, resources = reserve(config)
    except BaseException:
        if is_ours:
            ray.shutdown()
        raise

    def release() -> None:
        remove_placement_group(group)
        if is_ours:
            ray.shutdown()

    try:
        return ray_engine(config, group=group, resources=resources, release=release)
    except BaseException:
        release()
        raise
