"""Plain decoding against speculative decoding: the same requests in turns, by two engines of the same model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from time import perf_counter
from typing import Any

from raylm.bench.cases import prompt_token_ids
from raylm.bench.report import SpeculationResult
from raylm.config.engine import EngineConfig
from raylm.config.source import locate
from raylm.core.drafting import DraftCounters, Drafter
from raylm.core.sampling import SamplingParams
from raylm.core.speculation import HostDrafter, ReplayProposer, Speculation
from raylm.engine.engine import Engine
from raylm.engine.factory import local_engine
from raylm.errors import ConfigError
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


class _Subject:
    """An engine under test."""

    def __init__(self, config: EngineConfig, drafter: Drafter | None = None) -> None:
        self.engine: Engine = local_engine(config, progress=False, drafter=drafter)
        self._num_requests = 0

    @property
    def counters(self) -> DraftCounters:
        return self.engine.stats().drafts

    def run(self, prompts: Sequence[list[int]], params: SamplingParams, streams: int) -> tuple[float, list[list[int]]]:
        """Seconds for these requests, so many at a time, and what they gave."""
        waiting: Iterator[tuple[int, list[int]]] = iter(enumerate(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        running: dict[str, int] = {}
        start = perf_counter()
        while True:
            while len(running) < streams and (following := next(waiting, None)) is not None:
                index, prompt = following
                self._num_requests += 1
                running[str(self._num_requests)] = index
                self.engine.add([str(self._num_requests)], prompt, params)
            if not running:
                return perf_counter() - start, outputs
            for delta in self.engine.step():
                outputs[running[delta.request_id]] += delta.token_ids
                if delta.finish_reason is not None:
                    del running[delta.request_id]


def measure_speculation(config: EngineConfig, settings: Settings) -> Iterator[SpeculationResult]:
    """One result for each kind and number of streams. Raises ConfigError."""
    if config.speculation.method == "none" and settings.replay is None:
        raise ConfigError("bench speculation needs --method or --replay")
    # A prompt comes twice, to the second engine for the first time.
    config = config.model_copy(update={"cache": config.cache.model_copy(update={"prefix_caching": False})})
    off = config.model_copy(update={"speculation": config.speculation.model_copy(update={"method": "none"})})
    text = TextProcessor.load(locate(config.model.path))
    known: dict[tuple[int, ...], list[int]] = {}
    plain = _Subject(off)
    try:
        drafter = None
        if settings.replay is not None:
            vocab_size = plain.engine.info.vocab_size
            proposer = ReplayProposer(known, settings.replay, vocab_size=vocab_size, seed=_SEED)
            drafter = HostDrafter(Speculation(proposer, config.speculation.num_drafts))
        subject = _Subject(off if drafter is not None else config, drafter)
        try:
            for kind in settings.kinds:
                for streams in settings.streams:
                    prompts = _prompts(kind, text, plain.engine, settings.requests)
                    yield _measure(plain, subject, config, settings, kind, prompts, streams, known)
        finally:
            subject.engine.shutdown()
    finally:
        plain.engine.shutdown()


def _measure(
    plain: _Subject,
    subject: _Subject,
    config: EngineConfig,
    settings: Settings,
    kind: str,
    prompts: list[list[int]],
    streams: int,
    known: dict[tuple[int, ...], list[int]],
) -> SpeculationResult:
    params = SamplingParams(temperature=0, max_tokens=settings.max_tokens, ignore_eos=kind == _RANDOM)
    for one in (plain, subject):
        one.run(prompts[:streams], SamplingParams(temperature=0, max_tokens=16), streams)
    before = subject.counters
    seconds = {plain: 0.0, subject: 0.0}
    num_tokens = num_same = 0
    for start in range(0, len(prompts), streams):
        piece = prompts[start : start + streams]
        known.clear()
        took, expected = plain.run(piece, params, streams)
        seconds[plain] += took
        known.update((tuple(prompt), output) for prompt, output in zip(piece, expected, strict=True))
        took, outputs = subject.run(piece, params, streams)
        # Numbers that round differently in steps of different shapes may end a greedy output elsewhere.
        seconds[subject] += took * sum(map(len, expected)) / sum(map(len, outputs))
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
        plain_tokens_per_s=num_tokens / seconds[plain],
        tokens_per_s=num_tokens / seconds[subject],
        ratio=seconds[plain] / seconds[subject],
        acceptance=accepted / drafted if drafted else None,
        accepted_per_step=accepted / verified if verified else None,
        drafted=drafted,
        same_outputs=num_same / len(prompts),
    )


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
        return [rng.choices(token_ids, k=_PROMPT_LEN) for _ in range(count or 32)]
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
