"""Configuration of what operators see: log lines and traces."""

from __future__ import annotations

from pydantic import Field, field_validator

from raylm.config.base import FrozenConfig
from raylm.log import LogFormat


class LogConfig(FrozenConfig):
    """The log of an ingress, on its standard error."""

    format: LogFormat = "text"
    """json: one object a line, with time, level, logger, event or message, and the event's fields. A model's processes
    write as its engine's runtime.log_format says."""
    requests: bool | None = None
    """One line a request at its end: id, model, tenant, engine, status, tokens, times; no text. None: where the format
    is json."""
    throughput_every_s: float = Field(default=10.0, ge=0, le=3600)
    """Seconds between two lines of each model's throughput, written where there was traffic; 0: none."""

    @property
    def has_requests(self) -> bool:
        return self.format == "json" if self.requests is None else self.requests


class TracingConfig(FrozenConfig):
    """OpenTelemetry spans of requests (the extra "tracing")."""

    endpoint: str | None = None
    """Where spans go by OTLP over HTTP, such as http://collector:4318/v1/traces. None: there are none."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Of requests whose client sends no `traceparent`; one that does has decided."""
    service_name: str = Field(default="raylm", min_length=1, max_length=100)

    @field_validator("endpoint")
    @classmethod
    def _is_an_address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError("must be an address such as http://collector:4318/v1/traces")
        return endpoint
