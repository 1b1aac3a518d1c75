"""What an engine can be told besides requests: done between two steps, after all that were planned before it.

Values of msgspec, which says by their tags which one a message holds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_PROFILED_STEPS = 1000
"""A trace of more is no longer read by the programs that show traces."""


class ResetCache(msgspec.Struct, tag="reset_cache", frozen=True):
    """Let no cached block be found any more. Running requests go on with theirs."""


RECORDING = "recording"
"""What a worker answers to StartProfile once it records."""


class StartProfile(msgspec.Struct, tag="start_profile", frozen=True):
    """Have every worker record its steps, into a file of its own in runtime.profile_folder."""

    num_steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROFILED_STEPS)] | None = None
    """Stop by itself after so many."""


class StopProfile(msgspec.Struct, tag="stop_profile", frozen=True):
    """Stop recording and write the files. Nothing where nothing is recorded any more."""


WorkerControl = StartProfile | StopProfile
"""What the workers do. Each of them answers with one line of text."""

Control = ResetCache | WorkerControl
