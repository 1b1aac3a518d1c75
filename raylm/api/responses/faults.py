"""What can be wrong with the store of responses."""

from __future__ import annotations

from raylm.errors import RaylmError


class StoreUnavailable(RaylmError):
    """The database cannot be reached or does not answer; another attempt may succeed."""


class StoreFull(RaylmError):
    """The database has no room on its disk."""


class TenantFull(RaylmError):
    """The tenant's stored responses take all that it may store."""
