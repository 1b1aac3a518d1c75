"""What can be wrong with the store of responses."""

from __future__ import annotations

from raylm.api.errors import HttpError

_NO_RETRY = ((b"x-should-retry", b"false"),)
"""OpenAI's clients try 429 and 5xx again by themselves."""


class StoreUnavailable(HttpError):
    """The database cannot be reached or does not answer; another attempt may succeed."""

    def __init__(self, message: str) -> None:
        headers = ((b"retry-after", b"5"),)
        super().__init__(
            503, message, kind="server_error", code="responses_store_unavailable", param="store", headers=headers
        )


class StoreFull(HttpError):
    """The database has no room on its disk."""

    def __init__(self, message: str) -> None:
        super().__init__(
            507, message, kind="server_error", code="responses_store_full", param="store", headers=_NO_RETRY
        )


class TenantFull(HttpError):
    """The tenant's stored responses take all that it may store."""

    def __init__(self, message: str) -> None:
        super().__init__(
            429, message, kind="insufficient_quota", code="responses_quota_exceeded", param="store", headers=_NO_RETRY
        )
