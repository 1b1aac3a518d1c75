"""Offline benchmarks: a case as one batch (throughput), or its requests one after another (latency)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from raylm.bench.cases import Case, Dataset, Request, prompt_token_ids
from raylm.bench.report import OfflineResult
from raylm.core.sampling import SamplingParams
from raylm.errors import ConfigError, RaylmError

if TYPE_CHECKING:
    from raylm.llm import LLM

Mode = Literal["throughput", "latency"]
DEFAULT_CASES = {"throughput": "batch:16:128:64", "latency": "single:3:128:64"}
_SEED_STEP = 1_000_003
_WARMUP_REQUESTS = 2
_WARMUP_TOKENS = 8
_GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One request in tokens, as every program under test takes it."""

    prompt_ids: list[int]
    output_len: int


class Runner(Protocol):
    """A program under test: generates output_len tokens for every request, whatever the tokens are.

    `run` returns the seconds that it took, from a batch that is ready to its last token.
    """

    name: str

    def run(self, requests: Sequence[TokenRequest]) -> float: ...


class RaylmRunner:
    """raylm: the requests of a call are one batch."""

    name = "raylm"

    def __init__(self, llm: LLM, sampling: SamplingParams = _GREEDY) -> None:
        self._llm = llm
        self._sampling = sampling

    def run(self, requests: Sequence[TokenRequest]) -> float:
        start = perf_counter()
        lengths = {own.output_len for own in requests}
        params_of = {length: replace(self._sampling, max_tokens=length, ignore_eos=True) for length in lengths}
        params = [params_of[own.output_len] for own in requests]
        completions = self._llm.generate([own.prompt_ids for own in requests], params, progress=False)
        for completion, own in zip(completions, requests, strict=True):
            check_count(self.name, len(completion.outputs[0].token_ids), own.output_len)
        return perf_counter() - start


@dataclass(frozen=True, slots=True)
class Workload:
    """A case made of tokens: `draw` gives its requests, new ones for every repetition."""

    case: Case | Dataset
    draw: Callable[[int], list[TokenRequest]]

    @classmethod
    def of(cls, case: Case | Dataset, llm: LLM, seed: int) -> Workload:
        if isinstance(case, Dataset):
            fixed = [_tokenized(llm, request) for request in case.entries]
            return cls(case, lambda repetition: fixed)
        token_ids = prompt_token_ids(llm.info.vocab_size, llm.info.eos_token_ids)

        def draw(repetition: int) -> list[TokenRequest]:
            requests = case.token_requests(seed + _SEED_STEP * repetition, token_ids)
            return [_tokenized(llm, request) for request in requests]

        return cls(case, draw)


def warm_up(runner: Runner, workload: Workload, *, whole: bool = False) -> None:
    """A run of the case's shape with other prompts: allocations, thread pools and lazy imports happen here.

    A short one, or the whole case, where every number of rows that it passes through has a first time (CUDA graphs).
    """
    requests = workload.draw(0)
    if whole:
        runner.run(requests)
        return
    requests = requests[:_WARMUP_REQUESTS]
    runner.run([TokenRequest(own.prompt_ids, min(own.output_len, _WARMUP_TOKENS)) for own in requests])


def measure(runner: Runner, requests: Sequence[TokenRequest], mode: Mode) -> float:
    """Seconds for the requests: all at once, or one after another."""
    if mode == "throughput":
        return runner.run(requests)
    return sum(runner.run([request]) for request in requests)


def run_case(llm: LLM, case: Case | Dataset, mode: Mode, *, seed: int = 0, repeat: int = 1) -> OfflineResult:
    """Warm up and measure one case `repeat` times; the result carries the median."""
    workload = Workload.of(case, llm, seed)
    runner = RaylmRunner(llm)
    warm_up(runner, workload, whole=mode == "throughput" and llm.info.device != "cpu")
    seconds = [measure(runner, workload.draw(repetition), mode) for repetition in range(1, repeat + 1)]
    return result_of(workload, mode, median(seconds), model=llm.name)


def run_in_turns(
    llm: LLM, case: Case | Dataset, mode: Mode, samplings: Sequence[str], *, seed: int = 0, repeat: int = 1
) -> list[OfflineResult]:
    """As run_case for several ways of sampling, each the JSON of SamplingParams' fields, which take turns: a result for
    each. Raises ConfigError where one is no JSON, RequestRejected where a field is wrong."""
    workload = Workload.of(case, llm, seed)
    runners = [RaylmRunner(llm, _sampling(text)) for text in samplings]
    for runner in runners:
        warm_up(runner, workload, whole=mode == "throughput" and llm.info.device != "cpu")
    seconds: list[list[float]] = [[] for _ in runners]
    for repetition in range(1, repeat + 1):
        requests = workload.draw(repetition)
        for runner, own in zip(runners, seconds, strict=True):
            # What another one has left in the prefix cache must not help.
            llm.reset_prefix_cache()
            own.append(measure(runner, requests, mode))
    return [
        replace(result_of(workload, mode, median(own), model=llm.name), sampling=text)
        for text, own in zip(samplings, seconds, strict=True)
    ]


def _sampling(text: str) -> SamplingParams:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--sampling {text!r} is not valid JSON: {error}") from None
    if not isinstance(fields, dict) or fields.keys() - SamplingParams.__dataclass_fields__.keys():
        raise ConfigError(f"--sampling {text!r} must be a JSON object of fields of SamplingParams")
    return SamplingParams(**{"temperature": 0, **fields})


def result_of(workload: Workload, mode: Mode, seconds: float, *, model: str) -> OfflineResult:
    case = workload.case
    requests = workload.draw(1)
    output = sum(own.output_len for own in requests)
    prompt = sum(len(own.prompt_ids) for own in requests)
    return OfflineResult(
        bench=mode,
        model=model,
        case=case.name,
        requests=case.requests,
        input_len=case.input_len if isinstance(case, Case) else round(prompt / len(requests)),
        output_len=case.output_label,
        seconds=seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(output + prompt) / seconds,
        output_len_mean=output / len(requests) if isinstance(case.output_label, str) else None,
    )


def check_count(name: str, got: int, asked: int) -> None:
    """A program that stopped early would look fast. Raises RaylmError."""
    if got != asked:
        raise RaylmError(f"{name} generated {got} tokens where {asked} were asked for")


def _tokenized(llm: LLM, request: Request) -> TokenRequest:
    prompt = request.prompt
    if isinstance(prompt, str):
        prompt = llm.text.encode(prompt)
    elif request.is_chat:
        prompt = llm.text.chat(cast("list[dict[str, Any]]", prompt))
    return TokenRequest(cast("list[int]", prompt), request.output_len)
