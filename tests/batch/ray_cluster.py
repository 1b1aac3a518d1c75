"""What tests know of the cluster that conftest.py starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
        for child in self.process.children(recursive=True):
            try:
                if words in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Look again and again, for three minutes."""
    for _ in range(1800):
        if condition():
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"waited in vain for {what}")
