"""Runs steps in this process, on one device: offline use needs no cluster."""

from __future__ import annotations

from collections import deque
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from raylm.config.engine import EngineConfig
from raylm.config.resolve import DeviceKind, ResolvedEngine
from raylm.core.control import WorkerControl
from raylm.core.step import ModelInfo, Sampled, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.executor.base import Preparation, StepOnItsWay
from raylm.worker.device import choose_device
from raylm.worker.worker import Worker


class LocalExecutor:
    """One Worker, called directly. A GPU is given a plan's work when it is submitted; a CPU does it then."""

    def __init__(self, config: ResolvedEngine, *, progress: bool) -> None:
        self._worker: Worker | None = Worker(config, progress=progress)
        self._steps: deque[StepOnItsWay] = deque()
        self._results: deque[Sampled] = deque()
        """Of steps that had to end before something else was done."""
        self.overlaps = self._worker.overlaps
        """Whether a step runs while this process does something else."""

    def start(self) -> ModelInfo:
        return self._live_worker().start()

    def submit(self, plan: StepPlan) -> None:
        self._steps.append(self._live_worker().submit(plan))

    @property
    def done(self) -> bool:
        return bool(self._results) or self._steps[0].done

    def result(self) -> Sampled:
        if self._results:
            return self._results.popleft()
        # It leaves the queue once it is here: who interrupts the wait may ask again.
        result = self._steps[0].result()
        self._steps.popleft()
        return result

    def control(self, op: WorkerControl) -> list[str]:
        while self._steps:
            self._results.append(self._steps[0].result())
            self._steps.popleft()
        return [self._live_worker().control(op)]

    def prepare(self, structure: StructuredOutput) -> Preparation | None:
        future = self._live_worker().prepare(structure)
        return None if future is None else _Compiling(future)

    def check(self) -> None:
        """The worker is this process."""

    def shutdown(self) -> None:
        # Copies between device and host may still be under way in memory that goes with the worker.
        with suppress(RuntimeError):  # a device that has failed does nothing any more
            for step in self._steps:
                step.result()
        self._steps.clear()
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def _live_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor has been shut down")
        return self._worker


class _Compiling:
    """A grammar that a thread compiles."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, seconds: float) -> bool:
        futures.wait([self._future], seconds)
        return self._future.done()


def local_device(config: EngineConfig) -> DeviceKind:
    """The device that a worker in this process would take. Raises ConfigError."""
    return "cuda" if choose_device(config.runtime.device).type == "cuda" else "cpu"
