"""Whether a server can listen where it is to, asked before anything is started for it."""

from __future__ import annotations

import errno
import socket

from raylm.errors import ConfigError

_MAX_PORT = 65_535


def check_address(host: str, port: int) -> None:
    """Raises ConfigError when this machine has no such address, or its port cannot be had."""
    if not 1 <= port <= _MAX_PORT:
        raise ConfigError(f"the port to listen on (--port, http_options.port) is {port}; allowed: 1 to {_MAX_PORT}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise _no_address(host, str(error)) from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of a server before, which has ended, are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise _no_address(host, str(error)) from None
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
            raise ConfigError(f"port {port} of {host} {reason}; choose another (--port, http_options.port)") from None


def _no_address(host: str, reason: str) -> ConfigError:
    return ConfigError(
        f"the host to listen on (--host, http_options.host) is {host!r}, which is no address of this machine "
        f"({reason}); allowed: 127.0.0.1, 0.0.0.0 for all, or another one that it has"
    )
