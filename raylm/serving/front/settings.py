"""What the front's program is told: on its command line, as JSON. Standard library alone, as all that it imports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


class BadCertificate(Exception):
    """A certificate, or its key, that no client could use; what it says is a sentence."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: the server's certificate with those between it and its authority behind it, and its private key.
    The lowest version of TLS, 1.2 or 1.3."""

    certificate: str
    key: str
    min_version: str


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A socket's path, and its permissions."""

    path: str
    mode: int


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """FrontConfig, resolved, and the HAProxy to run. Times are in milliseconds."""

    binary: str
    header_timeout_ms: int
    body_timeout_ms: int
    max_connections: int
    max_connections_per_client: int
    count_loopback: bool
    trusted_proxies: tuple[str, ...]
    proxy_protocol: bool
    tls: Tls | None = None
    unix_socket: UnixSocket | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FrontSettings:
        values = json.loads(text)
        tls, unix_socket = values["tls"], values["unix_socket"]
        values["trusted_proxies"] = tuple(values["trusted_proxies"])
        values["tls"] = None if tls is None else Tls(**tls)
        values["unix_socket"] = None if unix_socket is None else UnixSocket(**unix_socket)
        return cls(**values)
