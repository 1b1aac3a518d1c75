"""For Python processes whose PYTHONPATH has this folder: SIGUSR1 makes a worker's next step run out of memory, SIGUSR2
makes it stay away from the collectives of its next step."""

from __future__ import annotations

import os
import signal
import threading


def _run_out_of_memory() -> None:
    import torch

    from raylm.worker.model_runner import ModelRunner

    def submit(self: ModelRunner, plan: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    ModelRunner.submit = submit


def _stay_away() -> None:
    from raylm.worker.model_runner import ModelRunner

    def submit(self: ModelRunner, plan: object) -> None:
        threading.Event().wait()

    ModelRunner.submit = submit


_FAULTS = {signal.SIGUSR1: _run_out_of_memory, signal.SIGUSR2: _stay_away}


def _listen() -> None:
    """In a thread: Python calls handlers in the main one, which in a Ray worker may be outside of Python for ever."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _FAULTS:
        signal.signal(number, lambda number, frame: None)
    threading.Thread(target=_obey, args=(reader,), daemon=True).start()


def _obey(reader: int) -> None:
    while byte := os.read(reader, 1):
        if (fault := _FAULTS.get(signal.Signals(byte[0]))) is not None:
            fault()


_listen()
