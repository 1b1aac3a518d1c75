"""What is counted of a model's completions, under the bounds of vLLM's histograms.

Everything runs in one event loop, so the counts are plain numbers without locks.
"""

from __future__ import annotations

from collections import Counter
from time import perf_counter

from raylm.core.histogram import Histogram
from raylm.core.sampling import SamplingParams
from raylm.core.step import Waited

# Upper bounds in seconds; those of vLLM, so that its dashboards fit.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
E2E_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTH_BOUNDS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000),
    *(20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000),
)
"""In tokens."""
N_BOUNDS = (1, 2, 5, 10, 20)

LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ModelMetrics:
    """The counts of one model."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        """Completions by finish reason; "abort" when the client left, "deadline" when its time was up, "error" when it
        was refused or the engine failed."""
        self.num_prompt_tokens = 0
        """Of prompts from which something was generated: a prompt that is refused does not count."""
        self.num_cached_tokens = 0
        """Of these prompts' tokens, those found in the prefix cache."""
        self.num_generation_tokens = 0
        self.time_to_first_token = Histogram(TTFT_BOUNDS)
        self.inter_token_latency = Histogram(ITL_BOUNDS)
        self.time_per_output_token = Histogram(ITL_BOUNDS)
        """The mean of each completion, from its first token to its last."""
        self.e2e_latency = Histogram(E2E_BOUNDS)
        self.queue_time = Histogram(E2E_BOUNDS)
        self.prefill_time = Histogram(E2E_BOUNDS)
        self.decode_time = Histogram(E2E_BOUNDS)
        self.inference_time = Histogram(E2E_BOUNDS)
        self.prompt_tokens = Histogram(LENGTH_BOUNDS)
        self.generation_tokens = Histogram(LENGTH_BOUNDS)
        self.longest_tokens = Histogram(LENGTH_BOUNDS)
        """Of each prompt's completions the longest one."""
        self.asked_n = Histogram(N_BOUNDS)
        self.asked_max_tokens = Histogram(LENGTH_BOUNDS)

    def prompt_begun(self, num_tokens: int, params: SamplingParams) -> None:
        """The first token of a prompt's completions is here."""
        self.num_prompt_tokens += num_tokens
        self.prompt_tokens.observe(num_tokens)
        self.asked_n.observe(params.n)
        if params.max_tokens is not None:
            self.asked_max_tokens.observe(params.max_tokens)

    def prompt_ended(self, longest: int) -> None:
        """All of a prompt's completions have ended; the longest has so many tokens."""
        if longest:
            self.longest_tokens.observe(longest)


class ChoiceMeter:
    """Measures one completion, from the moment its HTTP request arrived (`started`, a perf_counter time)."""

    __slots__ = ("_first", "_last", "_metrics", "_started", "_waited", "num_tokens")

    def __init__(self, metrics: ModelMetrics, started: float) -> None:
        self._metrics = metrics
        self._started = started
        self._first = self._last = 0.0
        self.num_tokens = 0
        self._waited: Waited | None = None

    def waited(self, waited: Waited) -> None:
        """What the engine says came before the first token. An engine that goes on with another's completion says so
        again: the first counts."""
        if self._waited is None:
            self._waited = waited

    def tokens(self, count: int) -> None:
        """One delta of `count` tokens; merged tokens share the time since the last delta."""
        if count == 0:
            return
        now = perf_counter()
        metrics = self._metrics
        if self._last:
            metrics.inter_token_latency.observe((now - self._last) / count, count)
        else:
            metrics.time_to_first_token.observe(now - self._started)
            self._first = now
        self._last = now
        self.num_tokens += count
        metrics.num_generation_tokens += count

    def finished(self, reason: str) -> None:
        metrics = self._metrics
        metrics.finished[reason] += 1
        metrics.e2e_latency.observe(perf_counter() - self._started)
        if (waited := self._waited) is None or not self.num_tokens:
            return
        decode_s = self._last - self._first
        metrics.queue_time.observe(waited.queue_s)
        metrics.prefill_time.observe(waited.prefill_s)
        metrics.decode_time.observe(decode_s)
        metrics.inference_time.observe(waited.prefill_s + decode_s)
        metrics.generation_tokens.observe(self.num_tokens)
        if self.num_tokens > 1:
            metrics.time_per_output_token.observe(decode_s / (self.num_tokens - 1))
