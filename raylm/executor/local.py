"""Runs steps in this process, on one device: offline use needs no cluster."""

from __future__ import annotations

from collections import deque

from raylm.config.engine import EngineConfig
from raylm.core.step import ModelInfo, StepPlan, StepResult
from raylm.worker.worker import Worker


class LocalExecutor:
    """One Worker, called directly. A plan runs when its result is asked for."""

    def __init__(self, config: EngineConfig, *, progress: bool) -> None:
        self._worker: Worker | None = Worker(config, progress=progress)
        self._plans: deque[StepPlan] = deque()

    def start(self) -> ModelInfo:
        return self._live_worker().start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def result(self) -> StepResult:
        return self._live_worker().step(self._plans.popleft())

    def shutdown(self) -> None:
        self._worker = None
        self._plans.clear()

    def _live_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor has been shut down")
        return self._worker
