"""OpenTelemetry spans of requests. This module needs the extra "tracing": only who traces imports it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from raylm import __version__
from raylm.config.observing import TracingConfig
from raylm.generation.record import Record

_NS = 1_000_000_000
_SEND_EVERY_MS = 1000
"""What an ingress that dies had not sent is lost."""
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Makes spans: one of the server's kind for a request, with one child a stage.

    The request's span begins with it, so that the ids that others are sent are known; the stages' spans are made of its
    record's times when it ends.
    """

    def __init__(self, config: TracingConfig, exporter: SpanExporter | None = None) -> None:
        """Spans go to `config.endpoint`, in a thread, or to the exporter that is given."""
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": config.service_name, "service.version": __version__}),
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            # An ingress that goes does not wait for a collector that is away.
            shutdown_on_exit=False,
        )
        sent_to = OTLPSpanExporter(endpoint=config.endpoint) if exporter is None else exporter
        self._provider.add_span_processor(BatchSpanProcessor(sent_to, schedule_delay_millis=_SEND_EVERY_MS))
        self._tracer = self._provider.get_tracer("raylm", __version__)
        self._live: dict[int, tuple[Span, int]] = {}

    def close(self) -> None:
        """Send what is left. It may take as long as the collector does."""
        self._provider.shutdown()

    def began(self, record: Record, headers: Mapping[bytes, bytes]) -> None:
        fields = [field for field in _PROPAGATOR.fields if field.encode() in headers]
        given = {field: headers[field.encode()].decode("latin-1") for field in fields}
        parent = _PROPAGATOR.extract(given, context=Context())
        at = time.time_ns()
        span = self._tracer.start_span(
            f"{record.method} {record.path}", parent, kind=SpanKind.SERVER, start_time=at, attributes=_asked(record)
        )
        sent: dict[str, str] = {}
        _PROPAGATOR.inject(sent, set_span_in_context(span, Context()))
        record.traceparent = sent.get("traceparent", "")
        self._live[id(record)] = span, at

    def ended(self, record: Record) -> None:
        span, at = self._live.pop(id(record))
        if record.is_look or not span.is_recording():
            return
        assert record.ended is not None, "a record that ended knows when"
        context = set_span_in_context(span, Context())
        for name, begin, end in _stages(record):
            child = self._tracer.start_span(name, context, start_time=at + _ns(begin - record.began))
            if name == "detokenise":
                child.set_attribute("raylm.busy_s", record.detokenise_s)
            child.end(at + _ns(end - record.began))
        span.set_attributes(_found(record))
        if record.outcome in ("error", "client_left"):
            span.set_status(Status(StatusCode.ERROR, record.error or record.outcome))
        span.end(at + _ns(record.ended - record.began))


def _stages(record: Record) -> list[tuple[str, float, float]]:
    """Name, begin and end of the stages that the request came to; the one in which it ended, ends with it."""
    assert record.ended is not None, "a record that ended knows when"
    ended = record.ended
    stages = [("receive", record.began, record.received or ended)]
    if record.received is not None:
        stages.append(("tokenise", record.received, record.prepared or ended))
    if record.prepared is not None:
        stages.append(("route", record.prepared, _routed(record)))
    if record.admitted is not None and record.first_token is None:
        stages.append(("queue", record.admitted, ended))
    if record.first_token is not None and record.last_token is not None:
        first, last = record.first_token, record.last_token
        if record.waited is not None:
            # The engine's seconds, told back from the token that came last: clocks of two hosts are not compared.
            prefill = first - record.waited.prefill_s
            stages.append(("queue", prefill - record.waited.queue_s, prefill))
            stages.append(("prefill", prefill, first))
        stages.append(("decode", first, last))
        # It goes on beside decoding, a delta at a time.
        stages.append(("detokenise", first, max(last, first + record.detokenise_s)))
    return stages


def _routed(record: Record) -> float:
    """When an engine had it. Its word of that comes with a step, maybe that of the prompt."""
    assert record.prepared is not None and record.ended is not None, "it was routed"
    admitted = record.admitted or record.ended
    if record.waited is None or record.first_token is None:
        return admitted
    taken = record.first_token - record.waited.prefill_s - record.waited.queue_s
    return min(admitted, max(taken, record.prepared))


def _asked(record: Record) -> dict[str, str]:
    return {"http.request.method": record.method, "url.path": record.path, "raylm.request_id": record.request_id}


def _found(record: Record) -> dict[str, str | int | float | list[str]]:
    """OpenTelemetry's names for generative AI, where it has one."""
    found: dict[str, str | int | float | list[str] | None] = {
        "http.response.status_code": record.status,
        "error.type": record.error or None,
        "gen_ai.request.model": record.model or None,
        "gen_ai.usage.input_tokens": record.prompt_tokens if record.model else None,
        "gen_ai.usage.output_tokens": record.completion_tokens if record.model else None,
        "gen_ai.response.finish_reasons": record.finish_reasons or None,
        "gen_ai.server.time_to_first_token": None if record.first_token is None else record.first_token - record.began,
        "raylm.cached_tokens": record.cached_tokens if record.model else None,
        "raylm.engines": record.engines or None,
        "raylm.route": record.route or None,
        "raylm.tenant": record.tenant or None,
        "raylm.outcome": record.outcome,
    }
    return {name: value for name, value in found.items() if value is not None}


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
