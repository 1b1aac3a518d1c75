"""Who runs a live response: the ingress that holds its lease."""

from __future__ import annotations

LEASE_S = 10.0
RENEW_EVERY_S = 1.0
"""At the latest after so long an owner finds out that a response has been ended from elsewhere."""
LIVE = ("queued", "in_progress")
"""A response of another status has ended."""
UNKNOWN_AFTER_S = 60.0
"""An ingress that does not know a response's model leaves it for so long to one that does."""
