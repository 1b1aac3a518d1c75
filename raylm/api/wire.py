"""What OpenAI's answers and events have in common."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from raylm import __version__
from raylm.api.errors import HttpError
from raylm.api.protocol import CompletionDetails, PromptDetails, Timings, Usage
from raylm.generation.choices import Counts, Tally
from raylm.generation.lines import one_line

FINGERPRINT = f"raylm-{__version__}"
"""OpenAI's system_fingerprint: with another one, the same seed may give other tokens."""
DONE = b"data: [DONE]\n\n"


class Reply(NamedTuple):
    """What every answer and chunk of one request says of it. `created` is in seconds since the epoch."""

    id: str
    created: int
    model: str


def usage_of(counts: Counts) -> Usage:
    total = counts.prompt + counts.completion
    details = PromptDetails(counts.cached)
    return Usage(counts.prompt, counts.completion, total, details, CompletionDetails(counts.reasoning))


def timings_of(tally: Tally, *, wanted: bool) -> Timings | msgspec.UnsetType:
    """How long the request took until now."""
    if not wanted:
        return msgspec.UNSET
    times, counts = tally.times(), tally.counts()
    rate = None if times.tokens_per_s is None else round(times.tokens_per_s, 2)
    first = None if times.first_token_s is None else round(times.first_token_s, 6)
    return Timings(first, round(times.total_s, 6), rate, counts.prompt, counts.cached, counts.completion)


def event(value: msgspec.Struct) -> bytes:
    """One SSE event."""
    return b"data: " + one_line(msgspec.json.encode(value)) + b"\n\n"


def error_event(error: HttpError) -> bytes:
    """An error after the answer has begun: the status is sent, so the stream carries it, as OpenAI's clients expect."""
    return b"data: " + one_line(error.body()) + b"\n\n" + DONE
