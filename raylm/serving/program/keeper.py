"""A server, or a batch, in a session of its own, and a small process that keeps it.

Ray's processes are in the process group of whoever starts them. A signal to the whole group (a closed terminal,
`timeout`, systemd) would end them together with the server, which then cannot end anything in order, and what they
started themselves, HAProxy, would stay and hold the port. So the group has the keeper alone: it hands signals on, and
kills what is left when the server has ended, however that came. If the keeper ends, by `kill -9` too, the server does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import psutil

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1


def fork_keeper(*, leave_s: float = 5.0) -> int | None:
    """Go on in a new process that leads a session of its own: None there. In this process, the new one's exit code as
    soon as it and its session have ended; what the server leaves there is killed after `leave_s` seconds. For a process
    with one thread."""
    end, kept = os.pipe()
    # Nothing is delivered before each side knows what to do about it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    server = os.fork()
    if server:
        os.close(end)
        on_signals(lambda number, frame: _end(server))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return _keep(server, leave_s)
    os.close(kept)
    os.setsid()
    on_signals(interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_keeper, args=(end,), name="keeper", daemon=True).start()
    return None


def on_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    """What the signals do that end a server. A hangup that is ignored stays so: nohup asks for that."""
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, once: whoever signals may do it twice, and nothing must cut the end short."""
    on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt


def _end(server: int) -> None:
    on_signals(signal.SIG_IGN)
    with suppress(ProcessLookupError):  # It may have ended by itself.
        os.kill(server, signal.SIGINT)


def _keep(server: int, leave_s: float) -> int:
    _, status = os.waitpid(server, 0)
    _clear(server, leave_s)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    print(f"raylm: the process was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return 128 - code


def _clear(session: int, leave_s: float) -> None:
    """Wait until a session is empty; kill what takes longer. Ray gives its workers process groups of their own."""
    deadline = time.monotonic() + leave_s
    while members := [pid for pid in psutil.pids() if _is_alive_in(session, pid)]:
        if time.monotonic() > deadline:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(_POLL_S)


def _is_alive_in(session: int, pid: int) -> bool:
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False  # It has ended meanwhile.


def _end_with_keeper(end: int) -> None:
    os.read(end, 1)  # Nothing is ever written: it returns when the keeper, who has the other end, is gone.
    os.kill(os.getpid(), signal.SIGINT)
