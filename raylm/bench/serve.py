"""Load on an OpenAI-compatible server: what it answers with, and when.

How the numbers are meant. TTFT runs from sending a request to its first chunk with content (to the first chunk with a
choice where none has any). ITL is the time between two such chunks, and a chunk may carry several tokens: a server
that merges tokens has fewer, longer gaps. TPOT is (end to end - TTFT) / (output tokens - 1) and does not depend on
merging. Tokens are counted by the server's usage, not by chunks. Waiting for a free slot under a concurrency limit is
no part of a request's times; it is the client that waits.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from raylm.bench.cases import Case, Dataset, Lengths, Request, prompt_token_ids
from raylm.bench.client import Client
from raylm.bench.report import ServeResult, percentile
from raylm.bench.sse import Answer, ClientError
from raylm.errors import ConfigError, RaylmError
from raylm.sim.arrivals import Ramp, arrivals

Endpoint = Literal["completions", "chat"]
WARMUP_REQUESTS = 4
_SEED_STEP = 1_000_003
# A dataset's own requests would leave their prompts in the server's prefix cache.
_DATASET_WARMUP = Case("warmup", WARMUP_REQUESTS, 64, Lengths(16, 16))


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent: at most `concurrency` at a time (None: no limit), `rate` a second (None: at once), with
    gaps of a gamma distribution of the shape `burstiness`. Of conversations this is their first turns; one counts as
    running until its last answer."""

    concurrency: int | None = None
    rate: float | Ramp | None = None
    burstiness: float = 1.0

    @property
    def rate_label(self) -> float | str:
        rate = "inf" if self.rate is None else self.rate.label if isinstance(self.rate, Ramp) else self.rate
        return rate if self.burstiness == 1 else f"{rate} gamma {self.burstiness:g}"


@dataclass(frozen=True, slots=True)
class Goodput:
    """Limits in milliseconds that a good request meets, all of them. `itl` bounds each of its gaps."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, limits: Sequence[str]) -> Goodput | None:
        """From words such as ttft:200; None of no words. Raises ConfigError."""
        found: dict[str, float] = {}
        for word in limits:
            name, _, value = word.partition(":")
            if name not in cls.__slots__ or not value.replace(".", "", 1).isdecimal() or float(value) <= 0:
                raise ConfigError(f"--goodput {word!r} must be ttft, itl, tpot or e2e and milliseconds, as in ttft:200")
            found[name] = float(value)
        return cls(**found) if found else None


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one answered request, in milliseconds."""

    ttft: float
    e2e: float
    gaps: list[float]
    tpot: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None

    @classmethod
    def of(cls, answer: Answer) -> Timing:
        first = answer.arrivals[0] if answer.arrivals else answer.first_choice
        if first is None:
            raise ClientError("the answer has no choices")
        ttft, e2e = 1e3 * (first - answer.sent), 1e3 * (answer.finished - answer.sent)
        gaps = [1e3 * (b - a) for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]
        # Without usage, chunks are the best count there is.
        tokens = len(answer.arrivals) if answer.output_tokens is None else answer.output_tokens
        tpot = (e2e - ttft) / (tokens - 1) if tokens > 1 else None
        return cls(ttft, e2e, gaps, tpot, answer.prompt_tokens or 0, tokens, answer.cached_tokens)

    def meets(self, limits: Goodput) -> bool:
        seen = {"ttft": self.ttft, "itl": max(self.gaps, default=None), "tpot": self.tpot, "e2e": self.e2e}
        for name, value in seen.items():
            limit = getattr(limits, name)
            if limit is not None and value is not None and value > limit:
                return False
        return True


@dataclass(slots=True)
class Run:
    """What all requests of one measurement gave."""

    seconds: float = 0.0
    timings: list[Timing] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked, and how."""

    url: str
    model: str
    api_key: str | None = None
    trusted: ssl.SSLContext | None = None
    """Who may be at an https address; None: whom the system trusts."""
    endpoint: Endpoint = "completions"
    vocab_size: int = 32000
    """Random prompts are token ids below this."""
    ignore_eos: bool = True
    timeout_s: float = 600.0
    session_header: str | None = None
    """A header that names the conversation, in each of its requests."""


def sweep(
    target: Target,
    cases: Sequence[Case | Dataset],
    loads: Sequence[Load],
    emit: Callable[[ServeResult], None],
    *,
    goodput: Goodput | None = None,
    seed: int = 0,
) -> None:
    """Every case under every load, one after another; `emit` takes each result. Raises RaylmError."""

    async def run() -> None:
        client = Client(target.url, api_key=target.api_key, trusted=target.trusted)
        generator = LoadGenerator(client, target, seed=seed)
        try:
            for case in cases:
                for load in loads:
                    emit(await generator.measure(case, load, goodput=goodput))
        finally:
            await client.close()

    _run_async(run)


class LoadGenerator:
    """Sends the requests of cases to one model of one server."""

    def __init__(self, client: Client, target: Target, *, seed: int = 0) -> None:
        self._client = client
        self._target = target
        self._seed = seed
        self._draws = 0
        self._sent = 0
        self._token_ids = prompt_token_ids(target.vocab_size)

    async def measure(self, case: Case | Dataset, load: Load, *, goodput: Goodput | None = None) -> ServeResult:
        """Warm up, then run one case. Raises RaylmError when not a single request was answered."""
        warmup = case if isinstance(case, Case) else _DATASET_WARMUP
        await self._run(self._requests(warmup)[:WARMUP_REQUESTS], Load())
        run = await self._run(self._requests(case), load)
        if not run.timings:
            raise RaylmError(f"case {case.name!r}: all {case.requests} requests failed; the first: {run.errors[0]}")
        return summarize(run, case, load, model=self._target.model, goodput=goodput)

    async def _run(self, requests: Sequence[Request], load: Load) -> Run:
        run = Run()
        slots = asyncio.Semaphore(load.concurrency or len(requests))
        start = perf_counter()
        async with asyncio.TaskGroup() as group:
            for request, arrival in zip(requests, self._arrivals(len(requests), load), strict=True):
                if (wait := start + arrival - perf_counter()) > 0:
                    await asyncio.sleep(wait)
                await slots.acquire()
                task = group.create_task(self._send(request, run))
                task.add_done_callback(lambda _: slots.release())
        run.seconds = perf_counter() - start
        return run

    def _arrivals(self, count: int, load: Load) -> list[float]:
        return arrivals(count, load.rate, self._seed, load.burstiness)

    async def _send(self, request: Request, run: Run) -> None:
        """A request and the turns behind it. One that fails is the last of its conversation."""
        self._sent += 1
        header = self._target.session_header
        headers = {header: f"{self._seed}-{self._sent}"} if header else {}
        following: Request | None = request
        while following is not None:
            request = following
            try:
                answer = await self._client.stream(
                    "/chat/completions" if request.is_chat else "/completions",
                    self._body(request),
                    timeout_s=self._target.timeout_s,
                    headers=headers,
                    keep_text=bool(request.turns),
                )
                run.timings.append(Timing.of(answer))
            except ClientError as error:
                run.errors.extend([str(error)] + ["the turn before failed"] * len(request.turns))
                return
            if request.turns:
                await asyncio.sleep(request.turns[0].think_s)
            following = request.following("".join(answer.text or []))

    def _body(self, request: Request) -> dict[str, object]:
        return {
            "model": self._target.model,
            "messages" if request.is_chat else "prompt": request.prompt,
            "max_tokens": request.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self._target.ignore_eos else {}),
        }

    def _requests(self, case: Case | Dataset) -> list[Request]:
        # New prompts each time, so that no run finds those of an earlier one in the prefix cache.
        self._draws += 1
        seed = self._seed + _SEED_STEP * self._draws
        chat = self._target.endpoint == "chat"
        if isinstance(case, Dataset):
            if case.redraw is not None:
                case = case.redraw(seed)
            return [_as_chat(request) for request in case.entries] if chat else list(case.entries)
        if chat:
            return case.chat_requests(seed)
        return case.token_requests(seed, self._token_ids)


def summarize(run: Run, case: Case | Dataset, load: Load, *, model: str, goodput: Goodput | None = None) -> ServeResult:
    """One line of result: rates over the whole run, percentiles over requests (ITL: over all gaps)."""
    timings = run.timings
    output = sum(timing.output_tokens for timing in timings)
    prompt = sum(timing.prompt_tokens for timing in timings)
    values = {
        "ttft": [timing.ttft for timing in timings],
        "itl": [gap for timing in timings for gap in timing.gaps],
        "tpot": [timing.tpot for timing in timings if timing.tpot is not None],
        "e2e": [timing.e2e for timing in timings],
    }
    shares = {f"{name}_ms_p{p}": percentile(seen, p / 100) for name, seen in values.items() for p in (50, 90, 99)}
    mixed = isinstance(case.output_label, str)
    return ServeResult(
        bench="serve",
        model=model,
        case=case.name,
        requests=case.requests,
        input_len=case.input_len if isinstance(case, Case) else round(prompt / len(timings)),
        output_len=case.output_label,
        seconds=run.seconds,
        output_tokens_per_s=output / run.seconds,
        total_tokens_per_s=(output + prompt) / run.seconds,
        output_len_mean=output / len(timings) if mixed else None,
        concurrency=load.concurrency or (len(case.entries) if isinstance(case, Dataset) else case.requests),
        request_rate=load.rate_label,
        goodput=sum(timing.meets(goodput) for timing in timings) / run.seconds if goodput else None,
        failed=len(run.errors),
        hit_rate=_hit_rate(timings),
        **shares,
    )


def _hit_rate(timings: Sequence[Timing]) -> float | None:
    told = [timing for timing in timings if timing.cached_tokens is not None]
    prompts = sum(timing.prompt_tokens for timing in told)
    return sum(timing.cached_tokens or 0 for timing in told) / prompts if prompts else None


def _run_async(main: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a coroutine on uvloop where it is installed (ray[serve] brings it): a third of asyncio's CPU a chunk."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())


def _as_chat(request: Request) -> Request:
    if request.is_chat or not isinstance(request.prompt, str):
        return request
    return Request([{"role": "user", "content": request.prompt}], request.output_len)
