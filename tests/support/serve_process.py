"""`raylm serve` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.support.hangup import ended_by_hangup


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command and the lines it prints; whatever of it lives at the end is killed."""
    command = ended_by_hangup([sys.executable, "-m", "raylm.cli", "serve", *arguments])
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))
    reader.start()
    try:
        yield process, lines
    finally:
        for child in psutil.Process().children(recursive=True):
            if child.pid == process.pid:
                process.kill()
        process.wait(30)
        reader.join(30)
        process.stderr.close()


def wait_for_line(process: subprocess.Popen[str], lines: list[str], text: str, seconds: int = 400) -> None:
    for _ in range(10 * seconds):
        if any(text in line for line in lines):
            return
        assert process.poll() is None, "".join(lines[-20:])
        threading.Event().wait(0.1)
    raise AssertionError(f"{text!r} was not printed: " + "".join(lines[-20:]))
