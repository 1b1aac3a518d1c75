"""Commands whose processes end at a hangup, also where the tests themselves ignore it, as under nohup."""

from __future__ import annotations

import sys

_RESET = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"


def ended_by_hangup(command: list[str]) -> list[str]:
    """`command`, whose first word is a path, in the same process, with SIGHUP as a program of a terminal has it. What a
    process ignores, its children ignore too."""
    return [sys.executable, "-c", _RESET, *command]
