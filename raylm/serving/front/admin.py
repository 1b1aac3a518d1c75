"""The admin socket that Serve uses, answered by the front's program: `show` commands go to HAProxy, a successor gets
the listening sockets, every other command is refused."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress

from raylm.serving.front.listeners import Handover, hand_over, is_handover

_TIMEOUT_S = 2.0
_MAX_REQUEST = 4096
_PID = re.compile(rb"^Pid: \d+$", re.MULTILINE)


class AdminSocket:
    """Listens at `path`, which is taken from whoever had it; only this user may connect."""

    def __init__(self, path: str, haproxy: str, handover: Callable[[], Handover]) -> None:
        self._path = path
        self._haproxy = haproxy
        self._handover = handover
        self._listener = socket.socket(socket.AF_UNIX)
        unnamed = f"{path}.{os.getpid()}"
        with suppress(FileNotFoundError):
            os.unlink(unnamed)
        self._listener.bind(unnamed)
        os.chmod(unnamed, 0o600)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._inode = os.stat(unnamed).st_ino
        os.rename(unnamed, path)

    def fileno(self) -> int:
        return self._listener.fileno()

    def answer(self) -> None:
        """Answer one connection."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            connection.settimeout(_TIMEOUT_S)
            request = connection.recv(_MAX_REQUEST)
            if is_handover(request):
                hand_over(connection, self._handover())
            elif request.startswith(b"show "):
                connection.sendall(_as_ours(ask(self._haproxy, request)))
            else:
                connection.sendall(b"Only what begins with `show` is answered here.\n")

    def close(self) -> None:
        """Stop answering; the path goes unless a successor has it."""
        self._listener.close()
        with suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)


def ask(path: str, request: bytes) -> bytes:
    """HAProxy's answer. Raises OSError when it does not answer."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_TIMEOUT_S)
        asking.connect(path)
        asking.sendall(request)
        return b"".join(iter(lambda: asking.recv(65536), b""))


def _as_ours(answer: bytes) -> bytes:
    """Serve compares the process that answers with the one that it started."""
    return _PID.sub(f"Pid: {os.getpid()}".encode(), answer, count=1)
