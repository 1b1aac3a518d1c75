"""What a user may ask of the scheduling of one request."""

from __future__ import annotations

from dataclasses import dataclass

from raylm.core.sampling_checks import integer
from raylm.errors import RequestRejected

MAX_PRIORITY = 1_000_000
MAX_SECONDS = 7 * 24 * 3600.0
MAX_NAME_CHARS = 256
MAX_WEIGHT = 1e6


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Scheduling of one request; every field is checked when the object is made.

    tenant: whose request it is, for fair scheduling.
    weight: what the tenant's share is worth, for fair scheduling; None: what the engine's tenant_weights say.
    priority: lower goes first, for scheduling by priority.
    deadline_s: seconds from arrival to the last token; a request that cannot make it is refused, one that did not is
        ended.
    queue_timeout_s: seconds that it may wait before it runs.
    cache_salt: requests share cached blocks only with those of equal salt.
    session: requests with equal names go to the same engine, where there are several and that one is not overloaded.

    Raises RequestRejected, naming the field, the value and the limit.
    """

    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    queue_timeout_s: float | None = None
    cache_salt: str = ""
    session: str = ""
    weight: float | None = None

    def __post_init__(self) -> None:
        for name in ("tenant", "cache_salt", "session"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
                raise RequestRejected(
                    f"{name} must be a string of at most {MAX_NAME_CHARS} characters, got {value!r:.300}", param=name
                )
            object.__setattr__(self, name, str(value))
        if self.weight is not None and not 0 < self.weight <= MAX_WEIGHT:
            raise RequestRejected(f"weight must be over 0 and at most {MAX_WEIGHT:g}, got {self.weight!r:.300}")
        object.__setattr__(self, "priority", integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY))
        for name in ("deadline_s", "queue_timeout_s"):
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_duration(value):
                raise RequestRejected(
                    f"{name} must be a number of seconds over 0 and at most {MAX_SECONDS:g}, got {value!r:.300}",
                    param=name,
                )
            object.__setattr__(self, name, float(value))


def _is_duration(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MAX_SECONDS
