"""What a process does now: the stacks of its threads and asyncio tasks, as text. No values are in it, only code."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import traceback
from typing import NamedTuple

MAX_TASKS = 200
"""Tasks of an event loop that are shown; an ingress may have one for each of thousands of streams."""


class ProcessStacks(NamedTuple):
    """One process: what it is, where, and its stacks; or why it did not tell them (`error`)."""

    process: str
    node: str
    pid: int
    stacks: str
    error: str | None = None


def stacks_here(process: str) -> ProcessStacks:
    """Those of this process. In an event loop its tasks are there too."""
    return ProcessStacks(process, socket.gethostname(), os.getpid(), _threads() + _tasks())


def _threads() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, 'of another library')} ({ident}):\n")
        parts += traceback.format_stack(frame)
    return "".join(parts)


def _tasks() -> str:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return ""
    parts = []
    for task in list(tasks)[:MAX_TASKS]:
        frames = task.get_stack(limit=20)
        parts.append(f"task {task.get_name()}:\n")
        parts += [line for frame in frames for line in traceback.format_stack(frame, limit=1)]
    if len(tasks) > MAX_TASKS:
        parts.append(f"... and {len(tasks) - MAX_TASKS} tasks more\n")
    return "".join(parts)
