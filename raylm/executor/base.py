"""What an engine asks of whatever runs its steps."""

from __future__ import annotations

from typing import Protocol

from raylm.core.control import WorkerControl
from raylm.core.step import ModelInfo, Sampled, StepPlan
from raylm.core.structure import StructuredOutput


class StepOnItsWay(Protocol):
    """A step that a worker's device has been given."""

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        ...

    def result(self) -> Sampled:
        """Wait for this step, and for none that was given later."""
        ...


class Preparation(Protocol):
    """What every worker does ahead of a request, beside the steps."""

    def wait(self, seconds: float) -> bool:
        """Wait up to so long; whether it has ended, well or not."""
        ...


class Executor(Protocol):
    """Delivers plans to workers and brings results back, in order."""

    def start(self) -> ModelInfo:
        """Load the model. Raises ConfigError when it cannot be, EngineDeadError when a worker dies at it."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Send a plan; it is run after those sent before it."""
        ...

    @property
    def done(self) -> bool:
        """Whether `result` returns, or raises, at once. There must be a plan not answered yet."""
        ...

    def result(self) -> Sampled:
        """The result of the oldest plan not answered yet. Raises EngineDeadError."""
        ...

    def control(self, op: WorkerControl) -> list[str]:
        """Have every worker do it, after the plans sent before and ahead of those sent later. What each of them says
        of it, by rank. Raises EngineDeadError."""
        ...

    def prepare(self, structure: StructuredOutput) -> Preparation | None:
        """Have the workers compile a grammar, so that no step waits for it; None where nothing needs to be done."""
        ...

    def check(self) -> None:
        """Raise EngineDeadError when a worker has gone: nobody waits for a result that would tell."""
        ...

    def shutdown(self) -> None:
        """Give back every process and all memory. May be called twice."""
        ...
