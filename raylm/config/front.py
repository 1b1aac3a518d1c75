"""Configuration of the front: HAProxy's limits on connections, before any request reaches an ingress."""

from __future__ import annotations

import ipaddress

from pydantic import Field, field_validator, model_validator

from raylm.config.base import FrozenConfig


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
