"""One log line a request: what it was and what it cost, without a word of what was asked or answered."""

from __future__ import annotations

from raylm.generation.record import Record
from raylm.log import event, get_logger

logger = get_logger(__name__)


class RequestLog:
    """Writes a line at a request's end. Probes and scrapes have none."""

    def began(self, record: Record, headers: dict[bytes, bytes]) -> None:
        return

    def ended(self, record: Record) -> None:
        if record.is_look:
            return
        assert record.ended is not None, "it is written at the end"
        event(
            logger,
            "request",
            id=record.request_id,
            method=record.method,
            path=record.path,
            status=record.status,
            outcome=record.outcome,
            error=record.error or None,
            model=record.model or None,
            tenant=record.tenant or None,
            engine=",".join(record.engines) or None,
            route=record.route or None,
            finish_reason=",".join(sorted(set(record.finish_reasons))) or None,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            completion_tokens=record.completion_tokens,
            queue_s=None if record.waited is None else round(record.waited.queue_s, 6),
            ttft_s=None if record.first_token is None else round(record.first_token - record.began, 6),
            total_s=round(record.ended - record.began, 6),
        )
