"""The response object as clients read it, and its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from raylm.api.errors import HttpError
from raylm.generation.choices import Counts
from raylm.generation.lines import one_line

encode = msgspec.json.Encoder().encode

Item = dict[str, Any]
"""One input or output item, as in JSON."""


class ResponseFault(msgspec.Struct):
    code: str
    message: str


class Incomplete(msgspec.Struct):
    reason: str


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """OpenAI's object. Times are in seconds since the epoch."""

    id: str
    kind: str = msgspec.field(default="response", name="object")
    created_at: int
    status: str
    background: bool
    completed_at: int | None = None
    error: ResponseFault | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: Mapping[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Mapping[str, object]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: Mapping[str, object]
    tool_choice: object
    tools: list[object]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class Deleted(msgspec.Struct):
    id: str
    kind: str = msgspec.field(default="response", name="object")
    deleted: bool = True


def usage_of(counts: Counts) -> ResponseUsage:
    total = counts.prompt + counts.completion
    details = OutputDetails(counts.reasoning)
    return ResponseUsage(counts.prompt, InputDetails(counts.cached), counts.completion, details, total)


def fault_of(error: HttpError) -> ResponseFault:
    """An error as a response names it, by one of OpenAI's codes for responses."""
    if error.status >= 500:
        return ResponseFault("server_error", str(error))
    return ResponseFault("rate_limit_exceeded" if error.status == 429 else "invalid_prompt", str(error))


class EventMaker:
    """Makes the events of one response, which are numbered."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def number(self) -> int:
        """The next event's number, for an event that is made elsewhere."""
        self._next += 1
        return self._next - 1

    def make(self, kind: str, fields: Mapping[str, object]) -> bytes:
        """One server-sent event of this type."""
        data = one_line(encode({"type": kind, **fields, "sequence_number": self.number()}))
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def with_status(body: bytes, status: str, fault: ResponseFault | None = None) -> bytes:
    """A stored response with the status that it has by now."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["status"] = msgspec.Raw(encode(status))
    if fault is not None:
        fields["error"] = msgspec.Raw(encode(fault))
    return encode(fields)
