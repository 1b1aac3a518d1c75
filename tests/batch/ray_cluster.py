"""What tests know of the cluster that conftest.py starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil


class Cluster(NamedTuple):
    """`env` is for processes that are to reach the cluster; `process` is the parent of all of its own."""

    address: str
    dashboard: str
    env: dict[str, str]
    process: psutil.Process

    def processes(self, words: str) -> list[psutil.Process]:
        """Processes of the cluster whose command line holds `words`."""
        found = []
        for child in family(self.process):
            with suppress(psutil.NoSuchProcess):
                if words in " ".join(child.cmdline()):
                    found.append(child)
        return found


def family(process: psutil.Process) -> list[psutil.Process]:
    """The processes that `process` has started, and these in turn. None where it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def kill(processes: list[psutil.Process]) -> None:
    """Some may have ended meanwhile."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def wait_for(condition: Callable[[], object], what: str, log: Path | None = None) -> None:
    """Look again and again, until the test's own time limit; after ten minutes say what `log` holds."""
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"waited in vain for {what}: {log.read_text()[-3000:] if log else ''}")
