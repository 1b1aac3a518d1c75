"""Listening sockets for clients. The front's program makes them, HAProxy and the next program inherit them: while no
HAProxy runs, connections wait in the system's queue instead of being refused."""

from __future__ import annotations

import json
import os
import socket
import stat
from dataclasses import dataclass

_BACKLOG = 4096
_HANDOVER = b"handover\n"
_MAX_SOCKETS = 16
_TIMEOUT_S = 2.0


class CannotListen(Exception):
    """An address that another server has, or that is none of this machine."""


@dataclass(frozen=True, slots=True)
class Handover:
    """What a program leaves to the one after it: its process, the sockets by address, and the configuration of Serve's
    that it runs."""

    pid: int
    source: str
    sockets: dict[str, socket.socket]


def listen_unix(path: str, mode: int) -> socket.socket:
    """Listen on a socket of this machine, in the place of one that nobody listens on any more. Raises
    CannotListen."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        remove_dead(path)
        # Nobody gets in before the permissions are right.
        before = os.umask(0o777)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        os.chmod(path, mode)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {path}: {error.strerror or error}") from None
    return listener


def remove_dead(path: str) -> None:
    """Remove a socket that nobody listens on. Raises OSError where there is something else, or somebody listens."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError("there is something else of this name")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_TIMEOUT_S)
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError("another server listens there")


def listen(address: str) -> socket.socket:
    """Listen on HOST:PORT, `*` for all addresses of IPv4. Raises CannotListen."""
    host, _, port = address.rpartition(":")
    wanted = "0.0.0.0" if host in ("", "*") else host.strip("[]")
    try:
        family, kind, _, _, resolved = socket.getaddrinfo(wanted, int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            # Connections of a server before, which has ended, are no hindrance.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(resolved)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise CannotListen(f"cannot listen on {address}: {error.strerror}") from None
    return listener


def is_handover(request: bytes) -> bool:
    return request == _HANDOVER


def hand_over(connection: socket.socket, left: Handover) -> None:
    """Answer the request of a successor."""
    socket.send_fds(connection, [b"\0"], [listener.fileno() for listener in left.sockets.values()])
    words = {"pid": left.pid, "source": left.source, "addresses": list(left.sockets)}
    connection.sendall(json.dumps(words).encode())


def take_over(path: str) -> Handover | None:
    """Ask the program that answers at this admin socket; None where there is none, or a HAProxy of somebody else."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_TIMEOUT_S)
        try:
            asking.connect(path)
            asking.sendall(_HANDOVER)
            _, numbers, _, _ = socket.recv_fds(asking, 1, _MAX_SOCKETS)
            words = b"".join(iter(lambda: asking.recv(65536), b""))
        except OSError:
            return None
    if not numbers:
        return None
    said = json.loads(words)
    sockets = [socket.socket(fileno=number) for number in numbers]
    return Handover(said["pid"], said["source"], dict(zip(said["addresses"], sockets, strict=True)))
