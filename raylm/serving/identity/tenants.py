"""Tenants: what each may ask, and on what terms, from a file that is read again when it changes."""

from __future__ import annotations

import time
from collections.abc import Callable

from raylm.api.identity import Identity, Terms
from raylm.config.base import load_yaml
from raylm.config.tenants import TenantConfig, TenantsConfig
from raylm.serving.identity.counts import TenantCounts
from raylm.serving.identity.quota import TenantQuota
from raylm.serving.identity.shares import Shares
from raylm.serving.identity.watch import WatchedFile

_OF_ALL = ""


class Tenants:
    """The tenants of a server with keys."""

    def __init__(
        self, path: str | None, shares: Shares, counts: TenantCounts, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without a path no tenant has limits, and none uses another's cached prefixes. `clock` gives seconds. Raises
        ConfigError."""
        self._path = path
        self._shares = shares
        self._counts = counts
        self._config = TenantsConfig()
        self._known: dict[str, tuple[Terms, TenantQuota]] = {}
        self._file = None if path is None else WatchedFile(path, "limits of tenants", self._take, clock=clock)

    def known(self, identity: Identity) -> Identity:
        """With its tenant's terms and quota."""
        if self._file is not None:
            self._file.look()
        tenant = identity.tenant
        found = self._known.get(tenant)
        if found is None:
            config = self._config.tenants.get(tenant, self._config.default)
            quota = TenantQuota(tenant, config, self._shares, self._counts)
            found = self._known[tenant] = (_terms(tenant, config), quota)
        return identity._replace(terms=found[0], quota=found[1])

    def _take(self) -> int:
        assert self._path is not None, "there is a file"
        self._config = load_yaml(TenantsConfig, self._path)
        # Meters are the shares', and go on with what was used.
        self._known.clear()
        return len(self._config.tenants)


def _terms(tenant: str, config: TenantConfig) -> Terms:
    salt = tenant if config.cache_sharing == "tenant" else _OF_ALL
    return Terms(config.weight, config.best_priority, config.longest_deadline_s, salt)
