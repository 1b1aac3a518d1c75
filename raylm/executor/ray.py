"""Runs steps in Ray actors, one a device, in the engine's placement group."""

from __future__ import annotations

import gc
import time
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylm.config.engine import EngineConfig
from raylm.core.step import ModelInfo, StepPlan, StepResult
from raylm.errors import ConfigError, EngineDeadError
from raylm.executor.placement import Bundle, worker_bundle_index
from raylm.executor.step_channel import PlanReceiver, PlanSender, serve

_POLL_MS = 100
"""How often a wait for a result looks whether the worker still lives."""


class WorkerActor:
    """Ray's face of one Worker: start it, then let it serve the step channel until the engine closes it."""

    def __init__(self, config: EngineConfig) -> None:
        from raylm import log
        from raylm.worker.worker import Worker

        log.configure()
        self._worker = Worker(config, progress=False)

    def start(self) -> ModelInfo:
        return self._worker.start()

    def serve_steps(self, address: str) -> None:
        """Run plans until the channel closes. A failure goes to the engine and ends the worker."""
        # What lives now lives as long as the worker: no collection in the middle of a step has to look through it.
        gc.freeze()
        channel = PlanReceiver(address)
        try:
            serve(channel, self._worker.submit)
        except Exception as error:
            channel.fail(error)
            raise
        finally:
            channel.close()


class RayExecutor:
    """One WorkerActor behind a step channel. Its death, its failure or its silence raises EngineDeadError."""

    def __init__(self, config: EngineConfig, *, group: PlacementGroup, resources: Bundle) -> None:
        self._config = config
        self._channel = PlanSender()
        self._worker = _start_worker(config, group, resources)
        self._serving: ray.ObjectRef[None] | None = None

    def start(self) -> ModelInfo:
        timeout = self._config.runtime.start_timeout_s
        try:
            info: ModelInfo = ray.get(self._worker.start.remote(), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise EngineDeadError(f"the worker was not ready after runtime.start_timeout_s {timeout:g} s") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(str(error.cause)) from None
            raise
        except ray.exceptions.RayActorError as error:
            raise EngineDeadError(f"the worker died while it loaded the model: {error}") from None
        self._serving = self._worker.serve_steps.remote(self._channel.address)
        return info

    def submit(self, plan: StepPlan) -> None:
        self._channel.send(plan)

    def result(self) -> StepResult:
        timeout = self._config.runtime.step_timeout_s
        deadline = time.monotonic() + timeout
        while True:
            result = self._channel.receive(_POLL_MS)
            if result is not None:
                return result
            self._check_worker()
            if time.monotonic() > deadline:
                raise EngineDeadError(f"no result after runtime.step_timeout_s {timeout:g} s")

    def shutdown(self) -> None:
        self._channel.close()
        ray.kill(self._worker, no_restart=True)

    def _check_worker(self) -> None:
        done, _ = ray.wait([self._serving], timeout=0)
        if not done:
            return
        try:
            ray.get(done[0])
        except ray.exceptions.RayError as error:
            raise EngineDeadError(f"a worker died: {error}") from None
        raise EngineDeadError("a worker left its step loop")


def _start_worker(config: EngineConfig, group: PlacementGroup, resources: Bundle) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=worker_bundle_index(0))
    return (
        ray.remote(WorkerActor)
        .options(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy, max_restarts=0
        )
        .remote(config)
    )
