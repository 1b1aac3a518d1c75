"""Who watches requests, by configuration."""

from __future__ import annotations

import importlib.util

from raylm.config.observing import LogConfig, TracingConfig
from raylm.errors import ConfigError
from raylm.serving.observing.request_log import RequestLog
from raylm.serving.observing.watch import Observer

_NEEDED = "opentelemetry.exporter.otlp.proto.http"


def check_tracing(config: TracingConfig) -> None:
    """Raises ConfigError where traces are wanted and their packages are not installed."""
    if config.endpoint is None:
        return
    try:
        found = importlib.util.find_spec(_NEEDED) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigError("tracing.endpoint is set, but OpenTelemetry is not installed: pip install -e '.[tracing]'")


def observers(log: LogConfig, tracing: TracingConfig) -> list[Observer]:
    """Those that the configuration wants; OpenTelemetry is imported where there are traces. Raises ConfigError."""
    found: list[Observer] = []
    if log.has_requests:
        found.append(RequestLog())
    if tracing.endpoint is not None:
        check_tracing(tracing)
        from raylm.serving.observing.tracing import Tracing

        found.append(Tracing(tracing))
    return found
