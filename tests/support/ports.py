"""Ports for tests that start servers."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)
"""Above those of Ray's workers, and below those that systems give to connections: one of these might be taken between a
look and the server's own."""


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
