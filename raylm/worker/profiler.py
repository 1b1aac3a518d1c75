"""A worker's steps, recorded by torch's profiler into a Chrome trace."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from raylm.core.control import RECORDING
from raylm.log import get_logger

logger = get_logger(__name__)


class StepProfiler:
    """At most one recording at a time, in the thread that runs the steps: torch records the thread that starts it."""

    def __init__(self, folder: str | None, *, rank: int, device: torch.device) -> None:
        """`folder`: where files go; None: there are none."""
        self._folder = folder
        self._rank = rank
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._recording: profile | None = None
        self._steps_left: int | None = None
        self._writing: threading.Thread | None = None
        self._said = "nothing is recorded"
        """Where the newest trace is, or why it is not."""

    def start(self, num_steps: int | None) -> str:
        """Record from now on; for `num_steps` steps where it is given. Returns what is done, for people."""
        if self._folder is None:
            return "runtime.profile_folder is not set: nothing is recorded"
        if self._recording is not None:
            return "steps are being recorded already"
        # Torch 2.11 warns of profiles that do not say what becomes of their events.
        recording = profile(activities=self._activities, acc_events=True)
        try:
            recording.start()
        except RuntimeError as error:  # another program has the GPU's counters
            return f"nothing is recorded: {error}"
        self._recording = recording
        self._steps_left = num_steps
        return RECORDING if num_steps is None else f"{RECORDING} {num_steps} steps"

    def step_ended(self) -> None:
        """A step has been submitted; once the last of `num_steps` has, the file is written beside the next ones."""
        if self._steps_left is None:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self._stop()

    def stop(self) -> str:
        """Stop recording. Returns once the file is there, with its name; or says why there is none."""
        self._stop()
        if self._writing is not None:
            self._writing.join()
        return self._said

    def _stop(self) -> None:
        recording, self._recording, self._steps_left = self._recording, None, None
        if recording is None or self._folder is None:
            return
        if ProfilerActivity.CUDA in self._activities:
            # What the device has been given belongs to the steps that were recorded.
            torch.cuda.synchronize()
        try:
            recording.stop()
        except RuntimeError as error:
            self._said = f"nothing was recorded: {error}"
            logger.warning("%s", self._said)
            return
        name = f"worker-{self._rank}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json.gz"
        self._writing = threading.Thread(
            target=self._write, args=(recording, Path(self._folder) / name), name="raylm-trace", daemon=True
        )
        self._writing.start()

    def _write(self, recording: profile, path: Path) -> None:
        """A file of this name is whole: it has another one until it is."""
        part = path.with_name(f"part-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            recording.export_chrome_trace(str(part))
            part.rename(path)
        except (OSError, RuntimeError) as error:
            self._said = f"the trace could not be written: {error}"
            logger.warning("%s", self._said)
        else:
            self._said = str(path)
            logger.info("a trace of steps is in %s", path)
