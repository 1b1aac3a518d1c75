"""The file of tenants: how much each may ask, and on what terms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raylm.config.base import FrozenConfig

TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")]


class TenantConfig(FrozenConfig):
    """What one tenant may do. A limit that is left out (null) does not hold. Limits hold for all ingresses together."""

    requests_per_minute: int | None = Field(default=None, ge=0)
    """Requests that generate, in any 60 seconds. 0: the tenant is shut out."""
    tokens_per_minute: int | None = Field(default=None, ge=0)
    """Tokens of prompts and answers, in any 60 seconds. A request is charged when it begins, for its prompt and the
    most that it may generate, and for what it used when it has ended. 0: the tenant is shut out."""
    concurrent_requests: int | None = Field(default=None, ge=0)
    """Requests that run or wait in an engine at once. 0: the tenant is shut out."""
    weight: float | None = Field(default=None, gt=0, le=1e6)
    """scheduler.policy fair: a tenant of weight 2 gets twice what one of weight 1 gets. Without it,
    scheduler.tenant_weights of the model's engine holds."""
    best_priority: int | None = Field(default=None, ge=-1_000_000, le=1_000_000)
    """The lowest number that a request may have as its `priority` (lower goes first). A request without one has it, or
    0 where that is lower still."""
    longest_deadline_s: float | None = Field(default=None, gt=0, le=7 * 24 * 3600)
    """Seconds after which a request is ended, whatever longer deadline it asks for."""
    cache_sharing: Literal["tenant", "all"] = "tenant"
    """Whose cached prefixes a request may use: those of its own tenant, or those of all tenants that say `all`."""


class TenantsConfig(FrozenConfig):
    """The whole file."""

    default: TenantConfig = TenantConfig()
    """For each tenant that is not named below, by itself."""
    tenants: dict[TenantName, TenantConfig] = {}
    """By the names that lines of the file of keys give."""
