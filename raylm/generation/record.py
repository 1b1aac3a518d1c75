"""What is remembered of one request for its log line and its trace, where somebody wants them: no text."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from raylm.core.step import Waited
from raylm.generation.choices import ChoiceDelta


@dataclass(slots=True)
class Record:
    """One HTTP request. Times are perf_counter seconds, None where it did not come so far.

    received: its body was there. prepared: its prompts were tokens. admitted: an engine had taken it.
    first_token, last_token: when they came here, of all sequences. waited: of the first sequence.
    detokenise_s: seconds in which tokens became text. prompt_tokens: of all its prompts, those that were cached too.
    engines: the ids of those that ran it; route: why it was the last of them. finish_reasons: of its sequences, by
    their ends.
    is_look: nobody needs a key for it (probes, metrics). traceparent: W3C's header for what it asks of others.
    """

    request_id: str
    method: str
    path: str
    began: float = field(default_factory=perf_counter)
    tenant: str = ""
    model: str = ""
    is_look: bool = False
    traceparent: str = ""
    received: float | None = None
    prepared: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    waited: Waited | None = None
    detokenise_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engines: list[str] = field(default_factory=list)
    route: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    error: str = ""
    """The kind of error that ended a stream which had begun."""
    status: int | None = None
    ended: float | None = None
    is_complete: bool = False
    """The answer went out to its end."""

    def has_prompts(self, model: str, num_tokens: int) -> None:
        """A generation begins: the first, or the next round of a response that calls tools."""
        self.model = model
        self.prompt_tokens += num_tokens
        if self.prepared is None:
            self.prepared = perf_counter()

    def runs_at(self, engine_id: str, route: str = "") -> None:
        """An engine has it, for that reason: the first, or another one that goes on."""
        if self.admitted is None:
            self.admitted = perf_counter()
        if engine_id and engine_id not in self.engines:
            self.engines.append(engine_id)
            self.route = route

    def gained(self, gained: ChoiceDelta, waited: Waited | None, seconds: float) -> None:
        """A delta has become text, which took `seconds`."""
        self.detokenise_s += seconds
        self.completion_tokens += gained.num_tokens
        self.cached_tokens += gained.num_cached
        if waited is not None and self.waited is None:
            self.waited = waited
        if gained.num_tokens:
            self.last_token = perf_counter()
            if self.first_token is None:
                self.first_token = self.last_token

    @property
    def outcome(self) -> str:
        """ok, refused (a 4xx), error, or client_left: the answer has no end, and nothing failed."""
        status = self.status or 0
        if 400 <= status < 500:
            return "refused"
        if self.error or status >= 500:
            return "error"
        return "ok" if self.is_complete else "client_left"
