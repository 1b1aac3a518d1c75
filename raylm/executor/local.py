"""Runs steps in this process, on one device: offline use needs no cluster."""

from __future__ import annotations

from collections import deque

from raylm.config.engine import EngineConfig
from raylm.core.step import ModelInfo, StepPlan, StepResult
from raylm.executor.base import StepOnItsWay
from raylm.worker.worker import Worker


class LocalExecutor:
    """One Worker, called directly. A GPU is given a plan's work when it is submitted; a CPU does it then."""

    def __init__(self, config: EngineConfig, *, progress: bool) -> None:
        self._worker: Worker | None = Worker(config, progress=progress)
        self._steps: deque[StepOnItsWay] = deque()
        self.overlaps = self._worker.overlaps
        """Whether a step runs while this process does something else."""

    def start(self) -> ModelInfo:
        return self._live_worker().start()

    def submit(self, plan: StepPlan) -> None:
        self._steps.append(self._live_worker().submit(plan))

    def result(self) -> StepResult:
        return self._steps.popleft().result()

    def shutdown(self) -> None:
        self._steps.clear()
        self._worker = None

    def _live_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor has been shut down")
        return self._worker
