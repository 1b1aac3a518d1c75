"""Plain decoding against speculative decoding: the same requests in turns.

Drafts of the host are switched off for the plain turns of one engine. What drafts on the device computes along in plain
steps too, so the plain turns have an engine of their own, without it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from time import perf_counter
from typing import Any, NamedTuple

from raylm.bench.cases import prompt_token_ids
from raylm.bench.report import SpeculationResult
from raylm.config.engine import EngineConfig
from raylm.config.speculation import SpeculationConfig, SpeculationMethod
from raylm.core.drafting import DraftCounters, Drafter, Proposal
from raylm.core.request import Request
from raylm.core.sampling import SamplingParams
from raylm.core.speculation import ReplayProposer, RequestDrafter, Speculation, make_drafter
from raylm.engine.engine import Engine
from raylm.engine.factory import local_engine
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.text.processor import TextProcessor

INSTRUCTIONS = {
    "copy": "Repeat the following text exactly, word for word:\n\n{text}",
    "extract": "Copy the first two sentences of the following text, word for word, and nothing else:\n\n{text}",
    "edit": 'Repeat the following text, but write "the server" wherever it says "raylm":\n\n{text}',
    "chat": "{text}",
}
"""What is asked about a text of the set; its chat questions are asked as they are."""
_RANDOM = "random"
KINDS = (*INSTRUCTIONS, _RANDOM)
METHODS: tuple[SpeculationMethod, ...] = ("ngram", "suffix", "draft_model", "eagle3", "mtp")
_PROMPT_LEN = 128
_SEED = 11


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run: `requests` of each kind (None: the whole set), `max_tokens` of each."""

    kinds: Sequence[str]
    streams: Sequence[int]
    requests: int | None
    max_tokens: int
    replay: float | None
    """Draft what the plain run gave, each token right with this probability."""


class _Switch:
    """A drafter that can be switched off: the engine then decodes plainly."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.is_plain = False

    @property
    def counters(self) -> DraftCounters:
        return self._drafter.counters

    def begin(self, request: Request) -> None:
        if not self.is_plain:
            self._drafter.begin(request)

    def end(self, request: Request) -> None:
        self._drafter.end(request)

    def is_on(self, num_rows: int) -> bool:
        return not self.is_plain and self._drafter.is_on(num_rows)

    def plan(self, requests: Sequence[Request]) -> dict[Request, Proposal]:
        return self._drafter.plan(requests)

    def settle(self, request: Request, proposal: Proposal, num_accepted: int) -> None:
        self._drafter.settle(request, proposal, num_accepted)

    def observe(self, num_rows: int, num_tokens: int, num_sampled: int, seconds: float) -> None:
        if not self.is_plain:
            self._drafter.observe(num_rows, num_tokens, num_sampled, seconds)


class _Window:
    """Tokens and seconds while all of the first requests decode: from the last one's first token until one ends."""

    def __init__(self, num_requests: int) -> None:
        self._missing = num_requests
        self._begin: tuple[float, int] | None = None
        self._latest = (0.0, 0)
        self._ended = False

    def step(self, now: float, num_tokens: int, num_begun: int, *, ended: bool) -> None:
        """A step is back, after which `num_begun` requests have tokens, `num_tokens` together."""
        self._ended = self._ended or ended
        if self._ended:
            return
        self._latest = (now, num_tokens)
        if self._begin is None and num_begun >= self._missing:
            self._begin = self._latest

    @property
    def counts(self) -> tuple[float, int]:
        """Seconds and tokens; 0 where one ended before all had begun."""
        if self._begin is None:
            return 0.0, 0
        return self._latest[0] - self._begin[0], self._latest[1] - self._begin[1]


class _Ran(NamedTuple):
    seconds: float
    outputs: list[list[int]]
    full_seconds: float
    full_tokens: int
    """While all streams decode."""


class _Subject:
    """The engine under test, with its drafter on or off, or two engines: one that drafts on the device, one plain."""

    def __init__(self, config: EngineConfig, settings: Settings) -> None:
        self._known: dict[tuple[int, ...], list[int]] = {}
        """Outputs of the plain run by prompt, to be replayed."""
        self._switch = _Switch(_drafter(config, settings, self._known))
        self._own_plain: Engine | None = None
        if config.speculation.on_device:
            plain_config, config = _sharing(config)
            self._own_plain = local_engine(plain_config, progress=False)
        try:
            self.engine: Engine = local_engine(config, progress=False, drafter=self._switch)
        except BaseException:
            if self._own_plain is not None:
                self._own_plain.shutdown()
            raise
        self._num_requests = 0

    @property
    def counters(self) -> DraftCounters:
        return self._switch.counters

    def shutdown(self) -> None:
        self.engine.shutdown()
        if self._own_plain is not None:
            self._own_plain.shutdown()

    def run(self, prompts: Sequence[list[int]], params: SamplingParams, streams: int, *, plain: bool) -> _Ran:
        """Run these requests, so many at a time."""
        engine = self._own_plain if plain and self._own_plain is not None else self.engine
        self._switch.is_plain = plain
        waiting: Iterator[tuple[int, list[int]]] = iter(enumerate(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        running: dict[str, int] = {}
        window = _Window(min(streams, len(prompts)))
        num_tokens = 0
        begun: set[str] = set()
        start = perf_counter()
        while True:
            while len(running) < streams and (following := next(waiting, None)) is not None:
                index, prompt = following
                self._num_requests += 1
                running[str(self._num_requests)] = index
                engine.add([str(self._num_requests)], prompt, params)
            if not running:
                break
            ended = False
            for delta in engine.step():
                outputs[running[delta.request_id]] += delta.token_ids
                num_tokens += len(delta.token_ids)
                begun.add(delta.request_id)
                if delta.finish_reason is not None:
                    del running[delta.request_id]
                    ended = True
            window.step(perf_counter(), num_tokens, len(begun), ended=ended)
        seconds = perf_counter() - start
        while engine.has_work:  # Steps on their way that compute nothing more of interest.
            engine.step()
        if plain:
            self._known.clear()
            self._known.update((tuple(prompt), output) for prompt, output in zip(prompts, outputs, strict=True))
        return _Ran(seconds, outputs, *window.counts)


def measure_speculation(config: EngineConfig, settings: Settings) -> Iterator[SpeculationResult]:
    """One result for each kind and number of streams. Raises ConfigError."""
    # A prompt comes twice.
    config = config.model_copy(update={"cache": config.cache.model_copy(update={"prefix_caching": False})})
    text = TextProcessor.load(locate(config.model.reference))
    subject = _Subject(config, settings)
    try:
        for kind in settings.kinds:
            for streams in settings.streams:
                count = settings.requests if kind != _RANDOM else (settings.requests or 2 * streams)
                yield _measure(subject, config, settings, kind, _prompts(kind, text, subject.engine, count), streams)
    finally:
        subject.shutdown()


def _drafter(config: EngineConfig, settings: Settings, known: dict[tuple[int, ...], list[int]]) -> Drafter:
    speculation = config.speculation
    if settings.replay is not None:
        if speculation.on_device:
            raise ConfigError(f"--replay gives the drafts by itself; it does not go with --method {speculation.method}")
        proposer = ReplayProposer(known, settings.replay, seed=_SEED)
        return RequestDrafter(Speculation(proposer, speculation.num_drafts))
    drafter = make_drafter(speculation) if speculation.method in METHODS else None
    if drafter is None:
        raise ConfigError(f"bench speculation measures {', '.join(METHODS)} or --replay, not {speculation.method}")
    return drafter


def _sharing(config: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """Configurations of a plain engine and of one that drafts, which share the memory of one. The plain one is to be
    started first: the other's share of a GPU counts all that this process has there."""
    cache = config.cache
    half = cache.model_copy(update={"cpu_memory_gib": cache.cpu_memory_gib / 2})
    first = half.model_copy(update={"gpu_memory_utilization": cache.gpu_memory_utilization / 2})
    plain = config.model_copy(update={"cache": first, "speculation": SpeculationConfig()})
    return plain, config.model_copy(update={"cache": half})


def _measure(
    subject: _Subject, config: EngineConfig, settings: Settings, kind: str, prompts: list[list[int]], streams: int
) -> SpeculationResult:
    params = SamplingParams(temperature=0, max_tokens=settings.max_tokens)
    if kind == _RANDOM:
        # Random weights say something else after the least rounding, and steps of other shapes round differently. A
        # bias fixes the output, so that a replayed draft is right as often as it should be.
        params = replace(params, ignore_eos=True, logit_bias=((prompts[0][0], 100.0),))
    # Sizes of steps that were never run take longer once.
    for plain in (True, False):
        subject.run(prompts[:streams], params, streams, plain=plain)
    before = subject.counters
    seconds = {True: 0.0, False: 0.0}
    full: dict[bool, list[_Ran]] = {True: [], False: []}
    num_tokens = num_same = 0
    for start in range(0, len(prompts), streams):
        piece = prompts[start : start + streams]
        for plain in (True, False):
            full[plain].append(subject.run(piece, params, streams, plain=plain))
        expected, outputs = full[True][-1].outputs, full[False][-1].outputs
        seconds[True] += full[True][-1].seconds
        # Numbers that round differently in steps of other shapes may end a greedy output elsewhere.
        seconds[False] += full[False][-1].seconds * sum(map(len, expected)) / sum(map(len, outputs))
        num_tokens += sum(map(len, expected))
        num_same += sum(a == b for a, b in zip(expected, outputs, strict=True))
    drafted, accepted, verified = _since(before, subject.counters)
    return SpeculationResult(
        bench="speculation",
        model=config.model.served_name,
        method=config.speculation.method if settings.replay is None else f"replay {settings.replay:g}",
        kind=kind,
        streams=streams,
        requests=len(prompts),
        output_tokens=num_tokens,
        plain_tokens_per_s=num_tokens / seconds[True],
        tokens_per_s=num_tokens / seconds[False],
        ratio=seconds[True] / seconds[False],
        decode_ratio=_decode_ratio(full[True], full[False]),
        acceptance=accepted / drafted if drafted else None,
        accepted_per_step=accepted / verified if verified else None,
        drafted=drafted,
        same_outputs=num_same / len(prompts),
    )


def _decode_ratio(plain: list[_Ran], speculative: list[_Ran]) -> float | None:
    """Speeds while all streams decode, one over the other."""
    speeds = []
    for runs in (speculative, plain):
        seconds = sum(run.full_seconds for run in runs)
        if not seconds:
            return None
        speeds.append(sum(run.full_tokens for run in runs) / seconds)
    return speeds[0] / speeds[1]


def _since(before: DraftCounters, after: DraftCounters) -> tuple[int, int, int]:
    return (
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        after.num_drafts - before.num_drafts,
    )


def _prompts(kind: str, text: TextProcessor, engine: Engine, count: int | None) -> list[list[int]]:
    """The requests of a kind; fewer than all are spread evenly over the set."""
    if kind == _RANDOM:
        token_ids = prompt_token_ids(engine.info.vocab_size, engine.info.eos_token_ids)
        rng = random.Random(_SEED)
        return [rng.choices(token_ids, k=_PROMPT_LEN) for _ in range(count or 2)]
    texts = [entry["text"] for entry in read_set() if (entry["kind"] == "chat") == (kind == "chat")]
    count = min(count or len(texts), len(texts))
    chosen = [texts[index * len(texts) // count] for index in range(count)]
    messages: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": INSTRUCTIONS[kind].format(text=one)}] for one in chosen
    ]
    return [text.chat(one) for one in messages]


def read_set() -> list[Mapping[str, str]]:
    """The measured set: {"kind": "text" or "chat", "text": ...}."""
    lines = resources.files("raylm.bench").joinpath("data/speculation.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in lines.splitlines()]
