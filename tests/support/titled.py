"""Processes by their titles, such as Ray gives its actors'."""

from __future__ import annotations

import psutil


def titled(title: str, *, under: int | None = None) -> list[psutil.Process]:
    """The processes below this one, or below the process `under`, with this in their title."""
    found = []
    for process in psutil.Process(under).children(recursive=True):
        try:
            if title in " ".join(process.cmdline()[:1]):
                found.append(process)
        except psutil.Error:
            continue
    return found
