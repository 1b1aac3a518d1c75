"""What the front's program is told: on its command line, as JSON. Standard library alone, as all that it imports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """FrontConfig, resolved, and the HAProxy to run. Times are in milliseconds."""

    binary: str
    header_timeout_ms: int
    body_timeout_ms: int
    max_connections: int
    max_connections_per_client: int
    count_loopback: bool
    trusted_proxies: tuple[str, ...]
    proxy_protocol: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FrontSettings:
        values = json.loads(text)
        return cls(**{**values, "trusted_proxies": tuple(values["trusted_proxies"])})
