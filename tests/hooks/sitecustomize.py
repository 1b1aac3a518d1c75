"""For Python processes whose PYTHONPATH has this folder: SIGUSR1 makes a worker's next step run out of memory, SIGUSR2
makes it stay away from the collectives of its next step."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def _run_out_of_memory(number: int, frame: FrameType | None) -> None:
    import torch

    from raylm.worker.model_runner import ModelRunner

    def submit(self: ModelRunner, plan: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    ModelRunner.submit = submit


def _stay_away(number: int, frame: FrameType | None) -> None:
    from raylm.worker.model_runner import ModelRunner

    def submit(self: ModelRunner, plan: object) -> None:
        threading.Event().wait()

    ModelRunner.submit = submit


signal.signal(signal.SIGUSR1, _run_out_of_memory)
signal.signal(signal.SIGUSR2, _stay_away)
