"""Callers: from a request's headers to who asks, on what terms."""

from __future__ import annotations

import re
from collections.abc import Mapping

from raylm.api.errors import HttpError
from raylm.api.identity import Identity, Terms
from raylm.config.serving import HttpConfig
from raylm.core.options import MAX_SECONDS
from raylm.serving.identity.counts import TenantCounts
from raylm.serving.identity.keys import ApiKeys
from raylm.serving.identity.shares import Shares
from raylm.serving.identity.tenants import Tenants

DEADLINE = b"x-request-deadline-ms"
GRPC_DEADLINE = b"grpc-timeout"
_GRPC = re.compile(rb"([0-9]{1,8})([HMSmun])")
_PORT = re.compile(r":[0-9]*$")
MAX_HOST_CHARS = 100
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class Callers:
    """Who may ask a server: anybody, or who has one of its keys."""

    def __init__(self, config: HttpConfig, shares: Shares | None = None) -> None:
        """`shares`: of the tenants' limits; all of them where this is the only ingress. Raises ConfigError."""
        self.counts = TenantCounts()
        self._hosts = frozenset(config.allowed_hosts)
        self._open = Identity(terms=Terms(user_is_tenant=config.user_is_tenant))
        self._keys = ApiKeys(config.api_keys_file) if config.api_keys_file is not None else None
        self._tenants = Tenants(config.tenants_file, shares or Shares(), self.counts)

    def identify(self, headers: Mapping[bytes, bytes]) -> Identity:
        """Who asks, and how long the answer may take by the headers. Raises HttpError 401, 403 where it is not this
        server that is meant, and 400 where a deadline cannot be read."""
        if self._hosts:
            self._check_host(headers)
        identity = self._open if self._keys is None else self._tenants.known(self._keys.identify(headers))
        asked = _deadline_s(headers)
        if asked is None:
            return identity
        terms = identity.terms
        return identity._replace(terms=terms._replace(deadline_s=min(asked, terms.deadline_s or asked)))

    def named(self, tenant: str) -> Identity:
        """A tenant whose request was stored, as it is known now."""
        return self._open if self._keys is None else self._tenants.known(Identity(tenant))

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        host = _PORT.sub("", headers.get(b"host", b"").decode("latin-1").lower())
        if host in self._hosts or f"*.{host.partition('.')[2]}" in self._hosts:
            return
        message = f"This server is not asked by the name {host[:MAX_HOST_CHARS]!r}: http.allowed_hosts does not list it"
        raise HttpError(403, message, code="host_not_allowed")

    def check_key(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise HttpError 401 where there are keys, and the request brings none of them."""
        if self._keys is not None:
            self._keys.identify(headers)


def _deadline_s(headers: Mapping[bytes, bytes]) -> float | None:
    """The sooner of both headers' deadlines, in seconds from now."""
    found = []
    if (given := headers.get(DEADLINE)) is not None:
        if not given.isdigit() or not 0 < len(given) <= 10:
            raise _unreadable(DEADLINE, given, "a whole number of milliseconds over 0")
        found.append((DEADLINE, given, int(given) / 1000))
    if (given := headers.get(GRPC_DEADLINE)) is not None:
        match = _GRPC.fullmatch(given)
        if match is None:
            raise _unreadable(GRPC_DEADLINE, given, "up to 8 digits and one of H, M, S, m, u, n, such as 30S")
        found.append((GRPC_DEADLINE, given, int(match[1]) * _UNITS[match[2]]))
    for name, given, seconds in found:
        if seconds <= 0:
            raise _unreadable(name, given, "over 0")
    return min((min(seconds, MAX_SECONDS) for _, _, seconds in found), default=None)


def _unreadable(name: bytes, given: bytes, wanted: str) -> HttpError:
    shown = given[:40].decode("latin-1")
    return HttpError(400, f"The header {name.decode()} must be {wanted}, got {shown!r}", code="invalid_header")
