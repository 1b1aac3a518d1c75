"""What a request asks of scheduling, within what its tenant may ask for."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from raylm.api.identity import Identity
from raylm.core.options import RequestOptions
from raylm.errors import RequestRejected

_SALT_DIGITS = 32


def request_options(
    identity: Identity,
    *,
    user: str | None = None,
    priority: int | None = None,
    deadline_s: float | None = None,
    queue_timeout_s: float | None = None,
    cache_salt: str | None = None,
) -> RequestOptions:
    """What the fields of a request ask for. Raises RequestRejected where one is out of range, or beyond the tenant's
    terms."""
    terms = identity.terms
    usual = 0 if terms.best_priority is None else max(0, terms.best_priority)
    options = RequestOptions(
        tenant=(user or "") if terms.user_is_tenant else identity.tenant,
        priority=usual if priority is None else priority,
        deadline_s=deadline_s,
        queue_timeout_s=queue_timeout_s,
        cache_salt=cache_salt or "",
        weight=terms.weight,
        session=identity.session,
    )
    if terms.best_priority is not None and options.priority < terms.best_priority:
        raise RequestRejected(
            f"priority must be at least {terms.best_priority} for this API key, got {options.priority}",
            param="priority",
        )
    limits = [limit for limit in (options.deadline_s, terms.deadline_s) if limit is not None]
    if terms.salt is None:
        return replace(options, deadline_s=min(limits, default=None))
    return replace(options, deadline_s=min(limits, default=None), cache_salt=_salt(terms.salt, options.cache_salt))


def _salt(of_tenant: str, of_client: str) -> str:
    """One for each pair: no client can write another tenant's."""
    if not of_tenant and not of_client:
        return ""
    return sha256(f"{len(of_tenant)}:{of_tenant}{of_client}".encode()).hexdigest()[:_SALT_DIGITS]
