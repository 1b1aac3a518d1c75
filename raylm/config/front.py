"""Configuration of the front: HAProxy's limits on connections, before any request reaches an ingress."""

from __future__ import annotations

import ipaddress
import os
from typing import Literal

from pydantic import Field, field_validator, model_validator

from raylm.config.base import FrozenConfig

_MAX_SOCKET_PATH = 100


class TlsConfig(FrozenConfig):
    """HTTPS instead of HTTP. The files are read again when they change; connections that are open go on."""

    certificate: str
    """A file in PEM on every node: the server's certificate, behind it those between it and its authority."""
    key: str
    """A file in PEM on every node: the certificate's private key, without a password. It may be the same file."""
    min_version: Literal["1.2", "1.3"] = "1.2"
    """The lowest version of TLS."""

    @field_validator("certificate", "key")
    @classmethod
    def _are_the_same_for_all(cls, path: str) -> str:
        return absolute(path)


class UnixSocketConfig(FrozenConfig):
    """A socket of this machine, beside the port, on which HTTP is spoken without TLS."""

    path: str
    """Where it is made; its folder must be there."""
    mode: str = Field(default="660", pattern=r"^[0-7]{3}$")
    """Who may connect: the socket's permissions, in octal. Whoever may write to it may."""

    @field_validator("path")
    @classmethod
    def _fits(cls, path: str) -> str:
        if len(path.encode()) > _MAX_SOCKET_PATH:
            raise ValueError(f"must have at most {_MAX_SOCKET_PATH} bytes, the most that the system allows")
        return absolute(path)


def absolute(path: str) -> str:
    """Raises ValueError where a path depends on where who reads it runs."""
    if not os.path.isabs(path):
        raise ValueError("must be an absolute path: processes that read it run elsewhere")
    return path


class FrontConfig(FrozenConfig):
    """What HAProxy grants a client. The time of an idle connection between two requests is Serve's
    `http_options.keep_alive_timeout_s`."""

    header_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds in which a request's headers must be complete, from the connection's first moment on."""
    body_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Seconds in which the first 16 KiB of a body must be there; then seconds that a client may send nothing of the
    rest, or read nothing of an answer that waits for it."""
    max_connections: int = Field(default=8192, ge=2, le=1_000_000)
    """Open connections in all; fewer where the system's limit on open files is low (five for two connections). Further
    ones wait in the system's queue."""
    max_connections_per_client: int | None = Field(default=None, ge=1)
    """Open connections of one client: an IPv4 address, or 64 bits of an IPv6 address. Further ones are closed at once.
    None is half of `max_connections`, but no limit for loopback, where all clients share one address."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks (10.0.0.0/8) of load balancers in front. Their connections are not counted. Counted are the
    open requests of each client, which is the last address in X-Forwarded-For; over the limit they get 429."""
    tls: TlsConfig | None = None
    """None: plain HTTP."""
    unix_socket: UnixSocketConfig | None = None
    """None: the port alone."""
    proxy_protocol: bool = False
    """The trusted proxies begin each connection with the PROXY protocol: clients are counted by the address in it."""

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"{error}; give an address, or a network such as 10.0.0.0/8") from None
        return networks

    @model_validator(mode="after")
    def _agree(self) -> FrontConfig:
        if self.proxy_protocol and not self.trusted_proxies:
            raise ValueError("proxy_protocol wants trusted_proxies: who else may say which client a connection is of")
        if (self.max_connections_per_client or 0) > self.max_connections:
            raise ValueError(
                f"max_connections_per_client is {self.max_connections_per_client}; "
                f"allowed: up to max_connections ({self.max_connections})"
            )
        return self
